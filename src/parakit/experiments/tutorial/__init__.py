"""The tutorial "Megatron, Transformed!": 66 published runs on eight H100, trained, predicted and checked.

Its rows and texts are data in `examples/experiments/tutorial/`. The repository of the tutorial is
`vuiseng9/megatron-tutorials` at commit 0b2c030.
"""
