"""What every rank sends, holds and waits for, counted inside the training processes.

`recorder` is the one object a backend talks to; `collect` gathers the ranks' files afterwards.
"""
