"""`make bench-gpu`: Megatron on one GPU without Transformer Engine, measured against the published time.

`settings.py` says what is measured, `plan.py` in which order and how the device's ceilings are measured,
`run.py` runs the kit's own train command, `kernels.py` splits an iteration by its kernels.
"""
