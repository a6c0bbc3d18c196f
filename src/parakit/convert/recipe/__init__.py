"""Recipes of Megatron-Bridge and nemo-run: a run of the kit as one, and one as the kit's flags.

`table` says which flag is which field, once for both ways; `written` gives a recipe's text for a
`RunSpec`, `imported` the flags and variables of a recipe's container; `bridge` asks Bridge itself, in
an environment of its own, where `evaluate` runs. Only `parakit.launch` imports it.
"""
