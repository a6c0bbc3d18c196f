"""What is noticed while a run trains, a killed launcher, a hang, a full disk, and how the run is ended.

`ranks` starts and ends all processes of a run, through `supervisor`, which outlives a killed launcher,
or forked from one that has imported Megatron (`warm`); `hang` finds ranks that wait for ever,
`exit_status` says how the run ended. It lies below what composes and executes runs.
"""
