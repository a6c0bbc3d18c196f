"""What a run needs of its machines, below what composes and executes runs; README.md is the map."""
