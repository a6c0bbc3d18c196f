"""Start and end the processes of a run, and notice a killed launcher, a hang or a full disk.

`ranks` starts and ends all processes. They run below `supervisor`, which outlives a killed launcher; the
ranks of `warm` are forked from a process that has imported Megatron. `hang` finds ranks that wait for ever,
and `exit_status` decides how the run ended. Nothing here imports the modules that compose and execute runs.
"""
