"""`make bench-gpu`: Megatron on one GPU without Transformer Engine, measured against the published time.

`plan` makes cells of an experiment from the settings of `bench_gpu.yaml`, and says how the device's
ceilings are measured; `run` has the one runner train them within the time, and keeps what `measured`
takes from each run: the times, and the kernels' shares of them.
"""
