"""Checkpoints: saved while a run trains, proven, pruned, and gone on from."""
