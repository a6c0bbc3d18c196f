from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from parakit.config.files import ROOT
from parakit.config.flags import Flags, merge_flags
from parakit.config.model import model_names, training_flags
from parakit.config.run import Backend, DeviceKind, PatchFile, RunSpec, spec_from_flags
from parakit.config.strategy import parse_strategy, strategy_flags
from parakit.convert.recipe.bridge import read_recipe
from parakit.convert.recipe.fields import recipe_from_flags
from parakit.convert.recipe.flags import RecipeFlags, flags_from_fields
from parakit.convert.recipe.imported import build_imported_recipe
from parakit.convert.recipe.table import FLAGS_WITH_FIELDS, RecipeError, Symbol
from parakit.convert.recipe.written import render_entry, render_recipe
from parakit.launch import recipe as command
from parakit.launch.options import options_from_texts
from parakit.launch.recipe import export_recipe, read_recipe_run
from tests.convert.recipe.documents import recipe_of, source, write

STRATEGIES = {
    "baseline": 1,
    **dict.fromkeys(("dp2", "tp2", "sp2", "cp2", "pp2", "vpp2", "ep2"), 2),
    **dict.fromkeys(("zero1", "zero2", "zero3", "fsdp2", "dp2-zero1"), 2),
    **dict.fromkeys(("tp2ep2", "pp2ep2"), 4),
    "tp2pp2dp2": 8,
}
RUNS = ROOT / "tests/golden/runs"


@pytest.mark.slow
@pytest.mark.parametrize("model", model_names())
def test_every_strategy_of_a_model_comes_back_from_its_recipe_as_the_same_run(model: str) -> None:
    comes_back(model, *STRATEGIES)


@pytest.mark.parametrize("model", ["gpt2-tiny", "moe-tiny"])
def test_every_strategy_comes_back_from_its_recipe_as_the_same_run(model: str) -> None:
    comes_back(model, *STRATEGIES)


def test_every_model_comes_back_from_its_recipe_as_the_same_run() -> None:
    for model in model_names():
        comes_back(model, "tp2")


def comes_back(model: str, *strategies: str) -> None:
    for strategy in strategies:
        ranks = STRATEGIES[strategy]
        asked = source(f"train-{strategy}-{model}-{ranks}gpu")
        recipe = recipe_of(asked)
        reading = flags_from_fields(recipe.fields)
        read = spec_from_flags(reading.flags, ranks, DeviceKind.GPU, model)
        assert replace(read, strategy=strategy) == asked.spec
        assert (recipe.left_out, reading.left_out) == ((), ())
        assert trained_by(reading, asked.spec) == read


def test_a_recipe_comes_back_from_the_yaml_that_bridge_writes(tmp_path: Path) -> None:
    fields = recipe_of(source("train-tp2-llama3-8b-fp8-2gpu")).fields
    fields["model.attention_backend"] = Symbol("megatron.core.transformer.enums.AttnBackend.fused")
    read = read_recipe(str(write(tmp_path / "r.yaml", fields)))
    assert read.items() >= fields.items()
    assert Flags(flags_from_fields(read).flags).text("--attention-backend") == "fused"


def trained_by(reading: RecipeFlags, spec: RunSpec) -> RunSpec:
    """What the kit trains by an imported recipe's model file, target and variables."""
    ranks, model = spec.parallelism.world_size, spec.model
    made = build_imported_recipe(reading, model, ranks)
    strategy = made.target.removeprefix("train-").removesuffix(f"-{model}-{ranks}gpu")
    arguments = merge_flags(
        training_flags(made.family),
        made.model_flags,
        strategy_flags(parse_strategy(strategy, ranks)),
        ("--micro-batch-size", made.variables["MICRO_BATCH"]),
        ("--global-batch-size", made.variables["GLOBAL_BATCH"]),
        ("--seed", made.variables.get("SEED", "1234")),
        shlex.split(made.variables.get("EXTRA", "")),
    )
    return spec_from_flags(arguments, ranks, DeviceKind.GPU, model)


def test_recipe_of_a_cpu_run_leaves_out_and_names_its_cpu_flags() -> None:
    recipe = recipe_of(read_recipe_run(str(RUNS / "20261122T010857Z-tp2-gpt2-tiny-2cpu")))
    assert recipe.fields["model.tensor_model_parallel_size"] == 2
    assert recipe.fields["model.bias_activation_fusion"] is True
    assert "dist.distributed_backend" not in recipe.fields
    assert recipe.fields["dataset.blend"] == [["owt-ds/sample_text_document"], None]
    (sentence,) = recipe.left_out
    assert sentence.startswith("--transformer-impl local --distributed-backend gloo")
    assert "--transformer-impl" not in Flags(recipe.flags)._values


def test_defaults_of_bridge_that_are_not_megatrons_are_written_out() -> None:
    fields = recipe_of(source("train-tp2-gpt2-large-2gpu")).fields
    assert fields["model.cross_entropy_loss_fusion"] is False
    assert fields["model.bias_dropout_fusion"] is True
    assert fields["dataset.num_workers"] == 2
    assert fields["optimizer.weight_decay"] == fields["scheduler.end_weight_decay"] == 0.1
    # Under a dynamic loss scale Megatron takes NaN for an overflow; Bridge's rerun machine does not.
    assert fields["rerun_state_machine.check_for_nan_in_loss"] is False
    assert fields["mixed_precision.params_dtype"] == Symbol("torch.float16")


def test_a_tokenizer_without_files_counts_its_end_of_document_entry() -> None:
    asked = source("train-tp2-gpt2-large-2gpu")
    assert recipe_of(asked).fields["tokenizer.vocab_size"] == 50256


def test_synonyms_are_one_flag() -> None:
    asked = source("train-vpp2-gpt2-large-2gpu")
    arguments = merge_flags(asked.megatron_arguments, ("--recompute-activations",))
    spec = spec_from_flags(arguments, 2, DeviceKind.GPU, "gpt2-large")
    fields = recipe_from_flags(arguments, spec).fields
    assert fields["model.recompute_granularity"] == "selective"
    assert fields["model.virtual_pipeline_model_parallel_size"] == 2
    assert fields["model.overlap_p2p_comm"] is True
    assert fields["model.batch_p2p_comm"] is False


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"backend": Backend.NATIVE}, "The run trained with BACKEND=native"),
        ({"parallelism": parse_strategy("gpipe2", 2)}, "pipeline schedule gpipe is the native"),
    ],
)
def test_a_run_that_megatron_did_not_train_is_refused(
    change: dict[str, object], sentence: str
) -> None:
    asked = source("train-tp2-gpt2-large-2gpu")
    with pytest.raises(RecipeError, match=sentence):
        recipe_from_flags(asked.megatron_arguments, replace(asked.spec, **change))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--max-position-embeddings", "2048"), "2048 learned positions for sequences of 1024"),
        (("--multi-latent-attention",), "--multi-latent-attention makes a model"),
        (("--lr", "fast"), "--lr fast is not a number"),
    ],
)
def test_run_that_no_recipe_expresses_is_refused(arguments: tuple[str, ...], sentence: str) -> None:
    asked = merge_flags(source("train-tp2-gpt2-large-2gpu").megatron_arguments, arguments)
    with pytest.raises(RecipeError, match=sentence):
        recipe_from_flags(asked, spec_from_flags(asked, 2, DeviceKind.GPU))


def test_flags_and_settings_without_a_field_are_named() -> None:
    asked = source("train-tp2-gpt2-large-2gpu")
    spec = replace(asked.spec, patch_file=PatchFile("bug.py", "00"), shares_gpu=True)
    left_out = recipe_from_flags(
        (*asked.megatron_arguments, "--log-memory-interval", "5"), spec
    ).left_out
    assert [sentence.partition(":")[0] for sentence in left_out] == [
        "SHARE_GPU=1",
        "PATCH_FILE=bug.py",
        "--log-memory-interval 5",
    ]


@pytest.mark.parametrize(
    ("run", "to", "sentence"),
    [
        ("train-tp2-gpt2-xl-2gpu", "bridge", "refuses: gpt2-xl has 25 attention heads"),
        ("train-tp8pp16dp8-gpt3-175b-1024gpu", "nemo", "needs 1024 GPUs"),
        ("runs/none", "bridge", "is no run folder"),
    ],
)
def test_invalid_run_is_refused_before_anything_is_written(
    run: str, to: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "RECIPES", tmp_path / "recipes")
    with pytest.raises(ValueError, match=sentence):
        export_recipe(run, to, options_from_texts({}), Console())
    assert not (tmp_path / "recipes").exists()


def test_a_recipe_is_a_python_file_with_units_and_the_command_that_trains_it() -> None:
    asked = source("train-tp2-llama3-8b-2gpu")
    text = render_recipe(recipe_of(asked), asked.spec, "make …", "recipes/x/bridge_recipe.py")
    compile(text, "bridge_recipe.py", "exec")
    assert "torchrun --standalone --nproc-per-node 2 recipes/x/bridge_recipe.py" in text
    assert "            seq_length=8192,  # tokens\n" in text
    assert "            activation_func=torch.nn.functional.silu,\n" in text
    assert "            num_query_groups=8,  # heads of keys and values\n" in text
    entry = render_entry(asked.spec, "x", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "make …", "y")
    compile(entry, "nemo_entry.py", "exec")
    assert 'launcher="torchrun"' in entry


def test_each_field_is_in_the_table_once() -> None:
    changing = "--weight-decay-incr-style=linear"
    places = [
        field for row in FLAGS_WITH_FIELDS if changing not in row.only_with for field in row.recipe
    ]
    assert len(set(places)) == len(places)
