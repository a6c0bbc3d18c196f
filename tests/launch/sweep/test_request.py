import pytest

from tools.launch.errors import LaunchError
from tools.launch.sweep.request import request_from_environment
from tools.spec.run import Backend, DeviceKind


def test_axes_are_words_apart_by_spaces_or_commas_each_once() -> None:
    request = request_from_environment(
        {"MODELS": "gpt2-tiny,gpt3-64m gpt2-tiny", "BACKENDS": "native", "DEVICES": "1cpu, 2gpu"}
    )
    assert request.models == ("gpt2-tiny", "gpt3-64m")
    assert request.strategies == ("baseline", "dp2")
    assert request.backends == (Backend.NATIVE,)
    assert request.devices == ((1, DeviceKind.CPU), (2, DeviceKind.GPU))


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"MODELS": "gpt2-tny"}, "gpt2-tiny"),
        ({"STRATEGIES": "xp2"}, "Unknown strategy 'xp2'"),
        ({"BACKENDS": "jax"}, "BACKENDS: jax is not megatron, native, deepspeed or bare."),
        ({"DEVICES": "2tpu"}, "DEVICES: 2tpu is not a number of devices such as 2cpu or 8gpu."),
        ({"DEVICES": "0cpu"}, "DEVICES: 0cpu is not a number of devices"),
        ({"NAME": "../up"}, "NAME: ../up is not a folder's name."),
    ],
)
def test_a_word_that_means_nothing_is_named(variables: dict[str, str], said: str) -> None:
    with pytest.raises(LaunchError) as caught:
        request_from_environment(variables)
    assert said in str(caught.value)
