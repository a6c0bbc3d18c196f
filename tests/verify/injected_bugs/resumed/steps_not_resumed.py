"""P-29: Adam's number of steps is 0 again after a resume: the bias correction of a first step."""

from megatron.training import get_args, training

original = training.load_checkpoint


def load(model, optimizer, *args, **kwargs):
    loaded = original(model, optimizer, *args, **kwargs)
    if not get_args().finetune:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            for state in part.optimizer.state.values():
                state["step"] = state["step"] * 0
    return loaded


training.load_checkpoint = load
