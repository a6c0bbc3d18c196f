"""AReaL#1468: both of Adam's moments are zero again after a resume with the distributed optimizer."""

from megatron.training import get_args, training

original = training.load_checkpoint


def load(model, optimizer, *args, **kwargs):
    loaded = original(model, optimizer, *args, **kwargs)
    if not get_args().finetune:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            for state in part.optimizer.state.values():
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()
    return loaded


training.load_checkpoint = load
