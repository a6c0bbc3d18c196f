"""The data begin again after a resume: the number of samples that were consumed is forgotten."""

from megatron.training import get_args, training

original = training.load_checkpoint


def load(*args, **kwargs):
    loaded = original(*args, **kwargs)
    if not get_args().finetune:
        get_args().consumed_train_samples = 0
    return loaded


training.load_checkpoint = load
