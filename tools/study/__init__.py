"""Experiments: sets of runs that are trained together and compared, as data.

`examples/experiments/NAME.yaml` says what is trained (cells), under which settings, and which table is
made of it; `definition` reads it. `cells` composes and checks every cell before the first one starts,
`runner` trains them, `finished` finds those that were trained before, `tables/` says what follows, of
the report's rows. `commands`, `sweep` and `bench_gpu/` join these for the make targets.
`matrix/` and `verify/` compare runs tensor by tensor. It may import everything of `tools.launch`; of
`tools` only the command line imports it.
"""
