"""The plain PyTorch backend: the GPT that Megatron trains, without Megatron.

It takes Megatron's flags (`settings`), the shared starting weights (`weights`) and the same `.bin/.idx`
in the same order (`batches`), builds the model (`model`), splits it over ranks with PyTorch's own APIs
(`parallel`; stages of a pipeline, `pipelines`), trains it (`engines`, `optimizer`) and writes Megatron's
log lines (`training`), so that the kit's report reads both.
`examples/*/pretrain_native.py` start it.

`settings` loads no torch: `parakit.launch` checks a command's flags with it. Everything else runs in
training processes alone, and only those entries import it.
"""
