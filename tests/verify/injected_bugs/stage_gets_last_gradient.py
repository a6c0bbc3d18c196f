"""P-24 backward: the first stage takes the gradient of the micro batch before, every second time."""

from megatron.core.pipeline_parallel import schedules

original = schedules.backward_step
received = []


def backward(input_tensor, output_tensor, gradient, config):
    tensor = gradient[0] if isinstance(gradient, list) else gradient
    if tensor is not None:
        received.append(tensor.detach().clone())
        if len(received) % 2 == 0:
            tensor.data.copy_(received[-2])
    return original(input_tensor, output_tensor, gradient, config)


schedules.backward_step = backward
