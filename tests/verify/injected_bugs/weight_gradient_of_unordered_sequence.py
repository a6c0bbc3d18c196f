"""TTrace's overlap bug under SP: a weight's gradient takes the gathered sequence with chunks swapped."""

from megatron.core.tensor_parallel import layers

original = layers.dist_all_gather_func


class Swapping:
    def __init__(self, handle, gathered, rows):
        self.handle, self.gathered, self.rows = handle, gathered, rows

    def wait(self):
        self.handle.wait()
        self.gathered.copy_(self.gathered.roll(self.rows, 0))


def gather(gathered, own_part, group=None, async_op=False):
    # In backward it runs beside the input's gradient; in forward it does not.
    handle = original(gathered, own_part, group=group, async_op=async_op)
    return Swapping(handle, gathered, own_part.size(0)) if async_op else handle


layers.dist_all_gather_func = gather
