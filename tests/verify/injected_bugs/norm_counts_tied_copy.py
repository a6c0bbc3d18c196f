"""P-18 (B18): the last stage's copy of the tied embedding is counted in the norm as well."""

from megatron.core.optimizer import optimizer

optimizer.param_is_not_shared = lambda parameter: True
