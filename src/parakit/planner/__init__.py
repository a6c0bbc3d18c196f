"""What a run holds, sends and takes, in closed form, and a search for the best split of a model.

Takes a `RunSpec` (and a cluster, for time), gives bytes, calls and seconds by component. No torch; the
dry run's own process alone loads Megatron. Report and launch import it; it imports `parakit.config`,
`parakit.artifacts` and `parakit.formatting`.
"""
