"""Run a trainer and a serving engine on the same tokens, and explain why their log probabilities differ."""
