"""Experiments: sets of runs that are trained together and compared, as data.

`load` reads `examples/experiments/NAME.yaml` with the caller's variables into cells, each a job with
everything resolved. `engine` composes and checks every cell before the first one starts, trains them
(`runner`, which takes those that were made before, and submits the others on Slurm), and asks a table
what follows (`tables/`, columns over the report's rows). `commands` are the make targets.
`matrix/` and `verify/` compare runs tensor by tensor.
"""
