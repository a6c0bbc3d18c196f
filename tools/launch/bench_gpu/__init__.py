"""`make bench-gpu`: Megatron on one GPU without Transformer Engine, measured against the published time.

`settings.py` says what is measured, `plan.py` in which order, `run.py` runs the kit's own train command,
`kernels.py` splits an iteration by its kernels, `ceilings.py` asks the device what it can do at best.
"""
