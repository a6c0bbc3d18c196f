from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from parakit.config.errors import LaunchError
from parakit.config.flags import Flags
from parakit.convert.recipe import bridge
from parakit.convert.recipe.flags import flags_from_fields
from parakit.convert.recipe.imported import build_imported_recipe, model_name
from parakit.convert.recipe.table import RecipeError, Symbol, Value
from parakit.launch import recipe as command
from parakit.launch.recipe import import_recipe
from tests.convert.recipe.documents import recipe_of, source, write

Fields = dict[str, Value]


@pytest.fixture
def fields() -> Fields:
    return recipe_of(source("train-tp2-gpt2-large-2gpu")).fields


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kit without models, so that nothing is written into this one."""
    for family in ("gpt3", "moe"):
        (tmp_path / f"examples/{family}/models").mkdir(parents=True)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    return tmp_path


def test_a_recipe_becomes_a_model_and_the_target_that_trains_it(
    fields: Fields, kit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(kit / "My_Recipe.yaml", fields | {"train.global_batch_size": 128})
    assert import_recipe(str(file), "", 4, Console(width=400)) == 0
    printed = capsys.readouterr().out
    assert (
        "make train-tp2dp2-my-recipe-4gpu MICRO_BATCH=64 GLOBAL_BATCH=128 ITERS=100 "
        "DATA=owt-ds/openwebtext-10k_text_document\n"
    ) in printed
    written = (kit / "examples/gpt3/models/my-recipe.args").read_text().splitlines()
    assert "--num-layers 36" in written
    assert "--fp16" in written
    assert not [line for line in written if "parallel" in line or "data-path" in line]


def test_a_file_whose_name_names_no_model_is_refused(fields: Fields, kit: Path) -> None:
    with pytest.raises(
        LaunchError, match=r"___\.yaml has no letters or digits .* set NAME=my-model"
    ):
        import_recipe(str(write(kit / "___.yaml", fields)), None, None, Console())
    assert not list(kit.glob("examples/*/models/.args"))


def test_warmup_in_iterations_replaces_the_familys_fraction(fields: Fields, kit: Path) -> None:
    changed = fields | {"scheduler.lr_warmup_fraction": None, "scheduler.lr_warmup_iters": 4300}
    import_recipe(str(write(kit / "r.yaml", changed)), "mine", None, Console())
    written = (kit / "examples/gpt3/models/mine.args").read_text().splitlines()
    assert "--lr-warmup-fraction 0.01" in written
    assert not [line for line in written if line.startswith("--lr-warmup-iters")]


def test_another_model_of_that_name_stays(fields: Fields, kit: Path) -> None:
    file = str(write(kit / "r.yaml", fields))
    other = kit / "examples/gpt3/models/mine.args"
    other.write_text("--num-layers 1\n")
    with pytest.raises(LaunchError, match=r"Another model is in .*mine\.args already"):
        import_recipe(file, "mine", None, Console())
    assert other.read_text() == "--num-layers 1\n"


def changed(**values: Value) -> Callable[[Fields], Fields]:
    return lambda fields: (
        fields | {name.replace("__", "."): value for name, value in values.items()}
    )


@pytest.mark.parametrize(
    ("change", "ranks", "sentence"),
    [
        (changed(optimizer__lr="1e-4"), None, "optimizer.lr is '1e-4', not a number; YAML reads"),
        (changed(model__num_layers=36.5), None, "model.num_layers is 36.5, not a whole number"),
        (changed(model__hidden_size=None), None, "model.hidden_size is None"),
        (changed(model__seq_length=2048), None, "contradict one another"),
        (changed(model__activation_func=Symbol("torch.tanh")), None, "no flag; it has"),
        (changed(model__multi_latent_attention=True), None, "another architecture"),
        (changed(model__tensor_model_parallel_size=3), 2, "does not divide 2"),
        (changed(model__num_attention_heads=5), None, "Megatron refuses"),
        (changed(train__global_batch_size=65), None, "Megatron refuses"),
        (changed(mixed_precision="my_mixed"), None, "'my_mixed', a name not known here"),
        (changed(dataset__blend="owt-ds/x"), None, "not a list of prefixes"),
        (changed(train__train_iters=None, train__train_samples=9), None, "trained by iterations"),
        (changed(optimizer__lr=None), None, "has no learning rate"),
    ],
)
def test_a_recipe_that_makes_no_run_is_refused_before_anything_is_written(
    change: Callable[[Fields], Fields],
    ranks: int | None,
    sentence: str,
    fields: Fields,
    kit: Path,
) -> None:
    file = write(kit / "r.yaml", change(fields))
    with pytest.raises(ValueError, match=sentence):
        import_recipe(str(file), "mine", ranks, Console())
    assert not list((kit / "examples").rglob("*.args"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("model: {num_layers: 2}", "no recipe of Megatron-Bridge: it has no '_target_"),
        ("[1, 2]", "no recipe of Megatron-Bridge"),
        ("a: [", "is no YAML"),
        ("!!python/object/apply:os.system ['true']", "is no YAML"),
        ("_target_: x.ConfigContainer\nmodle: {num_layers: 2}", "no section 'modle'.*model"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=sentence):
        bridge.read_recipe(str(file))


def test_python_is_not_run_without_an_environment_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "r.py"
    file.write_text("raise SystemExit('was run')")
    monkeypatch.setattr(bridge, "ENVIRONMENT", tmp_path / "nothing")
    with pytest.raises(RecipeError, match="make setup-bridge"):
        bridge.read_recipe(str(file))
    with pytest.raises(RecipeError, match="there is no file"):
        bridge.read_recipe(str(tmp_path / "other.yaml"))


def test_fields_that_no_flag_expresses_are_named(fields: Fields) -> None:
    more: Fields = {
        "logger.log_energy": True,
        "comm_overlap.tp_comm_overlap": True,
        "tokenizer.tokenizer_type": "HuggingFaceTokenizer",
    }
    named = [sentence.split()[0] for sentence in flags_from_fields(fields | more).left_out]
    assert named == [
        "tokenizer.tokenizer_type",
        "logger.log_energy",
        "comm_overlap.tp_comm_overlap",
    ]


def test_weight_decay_is_the_schedulers(fields: Fields) -> None:
    """Bridge's own recipes give the optimizer 0.1 and the scheduler, which overrides it, 0.033."""
    apart: Fields = {"scheduler.start_weight_decay": 0.033, "scheduler.end_weight_decay": 0.033}
    reading = flags_from_fields(fields | apart)
    assert Flags(reading.flags).text("--weight-decay") == "0.033"
    assert [sentence for sentence in reading.left_out if "optimizer.weight_decay 0.1" in sentence]


def test_precision_by_name_is_replaced_by_its_fields(fields: Fields) -> None:
    bare = {
        dotted_name: value
        for dotted_name, value in fields.items()
        if not dotted_name.startswith("mixed_")
    }
    named = flags_from_fields({**bare, "mixed_precision": "bf16-mixed"})
    assert Flags(named.flags).has("--bf16")
    assert not Flags(named.flags).has("--grad-reduce-in-bf16")
    assert not Flags(flags_from_fields(bare).flags).has("--fp16")
    on_model = flags_from_fields({**bare, "model.bf16": True, "ddp.grad_reduce_in_fp32": True})
    assert Flags(on_model.flags).has("--bf16")


def test_empty_blend_of_data_sets_gives_no_flag(fields: Fields) -> None:
    read = build_imported_recipe(flags_from_fields(fields | {"dataset.blend": [[], []]}), "mine")
    assert "EXTRA" not in read.variables


def test_a_models_name_comes_from_the_file() -> None:
    assert model_name("Llama3_8B Recipe") == "llama3-8b-recipe"
