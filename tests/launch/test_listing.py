import io

import pytest
from rich.console import Console

from parakit.config.model import load_model
from parakit.launch import listing
from parakit.launch.devices import Gpu
from parakit.launch.listing import list_cpu_strategies, list_gpu_strategies, print_list

GIB = 2**30


@pytest.fixture(scope="module")
def listed() -> str:
    console = Console(file=io.StringIO(), width=160)
    print_list(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def figures(listed: str, beginning: str) -> list[str]:
    lines = (text.strip() for text in listed.splitlines())
    return next(text for text in lines if text.startswith(beginning)).split()


def test_the_pipelines_of_plain_pytorch_are_listed(listed: str) -> None:
    for name in ("gpipe2", "1f1b2", "interleaved2", "pipedream2bw", "pipedream-flush2"):
        assert name in listed


def test_models_show_their_true_sizes(listed: str) -> None:
    assert figures(listed, "blueberry-79m ")[1] == "79,059,840"
    assert figures(listed, "llama3-8b ")[1] == "8,030,261,248"


def test_a_model_that_is_published_under_another_size_is_explained(listed: str) -> None:
    assert (
        "gpt3-345m was published as 345M; its published dimensions, 12 layers of width 512, have "
        "64,109,568 parameters."
    ) in " ".join(listed.split())


def test_models_of_another_vocabulary_show_what_the_kits_data_make_of_them(listed: str) -> None:
    assert "llama3-8b 7,391,678,464" in " ".join(listed.split())


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("moe-tiny", "3,811,904 3,418,688 3,549,760 3,353,152 1,780,288 1,911,360"),
        ("blueberry-79m", "79,059,840 36,592,512 50,748,288 29,514,624 25,385,856 39,541,632"),
        (
            "mixtral-8x7b",
            "46,702,792,704 12,879,925,248 24,154,214,400 7,242,780,672 12,077,764,608 23,352,053,760",
        ),
    ],
)
def test_mixtures_show_what_is_active_and_what_a_rank_holds(
    listed: str, model: str, parameters: str
) -> None:
    table = listed.partition("Mixtures of experts")[2]
    # The columns are all, active, ep2, ep8, tp2ep2 and tp2ep2-etp1.
    assert figures(table, f"{model} ")[1:7] == parameters.split()


def test_every_strategy_trains_the_batch_in_the_table(listed: str) -> None:
    assert "Every strategy trains this global batch, rounded up to a multiple of its ranks." in (
        " ".join(listed.split())
    )


def test_what_fits_is_asked_of_the_strategies_that_a_model_has() -> None:
    moe, dense = load_model("moe-tiny"), load_model("moe-tiny-dense")
    assert list_cpu_strategies(moe, 100 * GIB)[2:5] == ("ep2", "ep2dp2", "tp2ep2")
    assert "ep2" not in list_cpu_strategies(dense, 100 * GIB)
    assert list_cpu_strategies(load_model("mixtral-8x7b"), 100 * GIB) == ()


def test_gpus_take_what_their_number_and_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(index, f"GPU-{index}", "A", 40 * GIB) for index in range(2)]
    assert list_gpu_strategies(load_model("blueberry-79m"), gpus) == ("baseline", "dp2", "ep2")
    assert list_gpu_strategies(load_model("mixtral-8x7b"), gpus) == ()
    monkeypatch.setattr(listing, "visible_gpus", lambda: tuple(gpus))
    console = Console(file=io.StringIO(), width=160)
    print_list(console)
    assert isinstance(console.file, io.StringIO)
    assert "GPUs here" in console.file.getvalue()


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_a_gpu_target_is_an_example_only_on_a_machine_with_its_gpus(
    num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [Gpu(number, f"GPU-{number}", "NVIDIA H200", 141 * GIB) for number in range(num_gpus)]
    monkeypatch.setattr(listing, "visible_gpus", lambda: gpus)
    console = Console(file=io.StringIO(), width=160)
    print_list(console)
    assert isinstance(console.file, io.StringIO)
    screen = console.file.getvalue()
    assert ("  make train-tp2-gpt2-large-2gpu\n" in screen) == (num_gpus == 2)
    assert ("On a machine with 2 GPUs also make train-" in screen) == (num_gpus == 0)
