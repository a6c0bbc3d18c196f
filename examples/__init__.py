"""What is trained and compared here: launch scripts, models, experiments, and studies of write-ups."""
