"""Runs over several machines: nodes that meet by themselves, and Slurm, which starts them."""
