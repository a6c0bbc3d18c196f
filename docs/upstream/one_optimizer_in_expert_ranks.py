"""Cures one-optimizer-in-expert-ranks: two optimizers load what a checkpoint holds of a single one."""

from megatron.core.optimizer.optimizer import ChainedOptimizer

load = ChainedOptimizer.load_state_dict


def of_one(self, state_dict):
    if len(self.chained_optimizers) > 1 and "param_groups" in state_dict:
        common = state_dict.pop("state", {})
        del state_dict["param_groups"]
        for index, optimizer in enumerate(self.chained_optimizers):
            own = state_dict[index]
            own["state"] = {**common, **own["state"]}
            settings = optimizer.optimizer.param_groups  # The scheduler sets rates anew.
            own["param_groups"] = [
                {**mine, **loaded}
                for mine, loaded in zip(settings, own["param_groups"], strict=True)
            ]
    load(self, state_dict)


ChainedOptimizer.load_state_dict = of_one
