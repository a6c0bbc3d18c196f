"""Change Megatron at run time where a machine or this kit needs it; its files stay unmodified.

`python -m megatron_patches ENTRY ARGS…` applies the patches that the context needs (`context`: version,
device, Transformer Engine) and runs the entry. Each module holds the patches of one reason; the folders
`cpu/`, `no_te/` and `fused/` say where they are needed. `registry` describes and applies patches,
`catalogue` lists all of them in order, and `patch_file` then executes the file of `PATCH_FILE=`.

This package runs inside training processes, on top of `parakit.accounting`. The commands of the kit
import only `context`, `fusions` and `patch_file`, which do not import torch. The planner's dry run
imports everything.
"""
