import pytest

from parakit.config.errors import LaunchError
from parakit.config.run import Backend, DeviceKind
from tests.given import swept


def test_axes_are_unique_values_separated_by_spaces_or_commas() -> None:
    cells = swept(
        {"MODELS": "gpt3-64m,gpt2-tiny gpt3-64m", "BACKENDS": "native", "DEVICES": "1cpu, 2gpu"}
    ).cells
    assert len(cells) == len(set(cells)) == 8
    assert [cell.job.model.name for cell in cells] == ["gpt2-tiny"] * 4 + ["gpt3-64m"] * 4
    assert [cell.job.strategy for cell in cells] == ["baseline", "dp2"] * 4
    assert {cell.job.options.backend for cell in cells} == {Backend.NATIVE}
    assert [(cell.job.devices, cell.job.device) for cell in cells[1:3]] == [
        (1, DeviceKind.CPU),
        (2, DeviceKind.GPU),
    ]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MODELS": "gpt2-tny"}, "gpt2-tiny"),
        ({"STRATEGIES": "xp2"}, "Unknown strategy 'xp2'"),
        ({"BACKENDS": "jax"}, "BACKENDS=jax is not megatron, native, deepspeed or bare."),
        ({"DEVICES": "2tpu"}, "DEVICES=2tpu is not a number of devices such as 2cpu or 8gpu."),
        ({"DEVICES": "0cpu"}, "DEVICES=0cpu is not a number of devices"),
        ({"NAME": "siz"}, "NAME=siz is no file of examples/experiments, but nearly size.yaml; use"),
    ],
)
def test_invalid_axis_value_is_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        swept(variables)
    assert message in str(caught.value)


def test_name_of_a_file_selects_its_axes_and_settings() -> None:
    size = swept({"NAME": "size"})
    assert (size.report, size.options.micro_batch_size) == ("size", 1)
    assert {cell.job.model.name for cell in size.cells} == {
        f"{kind}-{millions}m" for kind in ("dense", "moe") for millions in (1, 4, 16, 64)
    }
    # Without DEVICES the number of devices is that of the strategy's name.
    assert {(cell.job.strategy, cell.job.devices) for cell in size.cells} == {
        ("baseline", 1),
        ("dp2", 2),
        ("dp4", 4),
    }
    few = swept({"NAME": "size", "MODELS": "moe-1m", "BACKENDS": "native"})
    assert [cell.name for cell in few.cells] == [
        "native baseline moe-1m 1cpu",
        "native dp2 moe-1m 2cpu",
        "native dp4 moe-1m 4cpu",
    ]


def test_other_name_changes_only_the_report() -> None:
    assert swept({"NAME": "mine"}).report == "mine"
    assert swept({"NAME": "demo"}).cells == swept({}).cells
