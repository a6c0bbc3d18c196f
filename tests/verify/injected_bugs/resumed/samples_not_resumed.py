"""After a resume the last batch before it is trained on again: it was not counted as consumed."""

from megatron.training import get_args, training

original = training.load_checkpoint


def load(*args, **kwargs):
    loaded = original(*args, **kwargs)
    if not get_args().finetune:
        # Not 0, which Megatron corrects.
        get_args().consumed_train_samples -= get_args().global_batch_size
    return loaded


training.load_checkpoint = load
