"""Captures the tensors of one iteration, so that `parakit.verify` can compare two runs of one model.

With `KIT_CAPTURE` (a folder) every rank writes what `parakit.artifacts.capture` describes: inputs, every
module's inputs and outputs, their gradients, each parameter's gradient before and after reduction, the
norm, the optimizer's state and the updated weights. No module of Megatron is annotated: `probes` hooks
into modules by their names, `parameters` takes the place of a parameter's part from Megatron's own
`sharded_state_dict`. `start` is what the iteration begins with: it is repeated with weights, and what
modules are given, changed by one rounding error, to measure tolerances; `step` puts it together around
Megatron's `train_step`.
"""
