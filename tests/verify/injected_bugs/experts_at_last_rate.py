"""Under expert parallelism experts learn at the learning rate of the step before."""

from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

original = OptimizerParamScheduler.step


def step(self, increment):
    groups = [group for group in self.optimizer.param_groups if group.get("is_expert_parallel")]
    rates = [group["lr"] for group in groups]
    original(self, increment)
    if increment and parallel_state.get_expert_model_parallel_world_size() > 1:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


OptimizerParamScheduler.step = step
