"""What is to be trained and how it is split: models, strategies, and the targets that name both."""
