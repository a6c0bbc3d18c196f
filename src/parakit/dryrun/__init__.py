"""One rank's training iteration, run by Megatron itself on tensors without contents.

This package decides what must be replaced in torch and Megatron so that one process can be any rank of any world.
It is a process of its own, `python -m parakit.dryrun`, which the planner starts and which loads torch and Megatron.
No package imports it.
"""

__all__: list[str] = []
