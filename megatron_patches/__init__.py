"""What must change in Megatron at run time; on disk it stays unmodified.

`python -m megatron_patches ENTRY ARGS…` applies the patches that the runtime context needs (`context`:
version, device, Transformer Engine) and runs the entry. Each module holds the patches of one reason,
under `cpu/`, `no_te/` and `fused/` by where they are needed; `catalogue` lists all in order, `registry`
describes and applies them. `patch_file` then executes the file of `PATCH_FILE=`.

Runs inside training processes, on top of `parakit.accounting`. The commands import three modules, none with
torch: `parakit.launch` reads `context`, `fusions` and `patch_file`. The plan's dry run imports all.
"""
