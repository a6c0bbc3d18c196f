"""From and to what others train and load: weights and recipes."""
