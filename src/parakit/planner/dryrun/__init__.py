"""Dry runs of any rank of any world, compared with the closed forms.

`job` takes a `RunSpec` and a rank and has the process `parakit.dryrun` run Megatron's own iteration on tensors
without contents. `comparison` compares its calls, memory and parameters with the closed forms.
"""
