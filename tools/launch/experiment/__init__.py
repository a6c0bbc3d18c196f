"""Experiments: sets of runs that are trained together and compared, as data.

`examples/experiments/NAME.yaml` says what is trained (cells), under which settings, and which table is
made of it; `definition` reads it. `cells` composes and checks every cell before the first one starts,
`runner` trains them, `finished` finds those that were trained before, `measured` is what every table
takes from a run, `tables/` says what follows. `commands` and `sweep` join these for the make targets;
`bench_gpu/` and `bench_ledger` measure within a time, or within one run, and have loops of their own.
The top of `tools.launch`: it may import everything there, and only the command line imports it.
"""
