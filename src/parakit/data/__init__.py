"""Finished data sets, Megatron's `.bin/.idx` pairs: opened, verified, divided, measured, joined.

`indexed` is the format, the manifest and the quick check before a run; `split` is what Megatron's
`--split` makes of it; `merge` joins data sets in a `folder` that is there whole or not at all. Whoever
trains on a data set imports from here, `tools.preprocess` makes them. Every refusal is a `DatasetError`.
Of the kit it uses only `parakit.artifacts`, and no torch.
"""
