"""Convert runs of the kit to recipes of Megatron-Bridge and nemo-run, and recipes to the kit's flags.

`table` says once, for both directions, which flag of Megatron is which field of a recipe. `fields` turns
a run into fields and `written` renders them as Python files; `flags` turns fields into flags and
`imported` makes a model, a target and variables of the flags. `bridge` runs Megatron-Bridge in a virtual
environment of its own, where `evaluate` is executed. Only `parakit.launch` imports this package.
"""
