"""`make bench-gpu`: Megatron on one GPU without Transformer Engine, measured against the published time.

`plan` says what is measured, in which order and how the device's ceilings are; `run` runs the kit's own
train command while time lasts; `measured` takes the times, and the kernels' shares of them, from a run.

It has a loop of its own because a run here is limited in time: each is a process that can be ended
while the timed iterations it has logged count. `experiment.runner` trains in its own process to the
end, and takes only runs that ended well.
"""
