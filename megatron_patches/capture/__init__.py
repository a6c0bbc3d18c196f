"""Write the tensors of one iteration, so that `parakit.verify` can compare two runs of one model.

With `KIT_CAPTURE` (a folder) every rank writes what `parakit.artifacts.capture` describes. It writes inputs, and
every module's inputs and outputs with their gradients. It writes each parameter's gradient before and after
reduction, the gradient norm, the optimizer's state and the updated weights. Megatron is not annotated: `probes`
sets hooks on modules by their names, and `parameters` takes the position of a parameter's part from Megatron's own
`sharded_state_dict`. `start` saves what the iteration begins with. From there the iteration is repeated with
weights and module inputs that are changed by one rounding error, which measures tolerances. `step` runs all of this
around Megatron's `train_step`.
"""
