from dataclasses import replace
from pathlib import Path

import pytest

from parakit.config import model
from parakit.config.files import ROOT
from parakit.config.flags import Flags
from parakit.config.model import (
    UnknownModelError,
    apply_flags_to_model,
    load_model,
    model_names,
    replace_vocabulary,
    shape_from_flags,
)
from parakit.config.run import parse_fp8_recipe
from parakit.config.strategy import Batch
from parakit.costs.tensors import active_parameters, total_parameters

DIMENSIONS = [
    "--num-layers",
    "2",
    "--hidden-size",
    "96",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "8",
]


@pytest.mark.parametrize(
    ("name", "parameters", "batch", "sequence"),
    [
        ("gpt2-tiny", 3_423_616, Batch(4, 4), 64),
        ("gpt3-64m", 63_847_424, Batch(2, 4), 512),
        ("gpt3-345m", 64_109_568, Batch(1, 1536), 1024),
        ("gpt3-857m", 355_919_872, Batch(1, 1536), 2048),
        ("gpt2-large", 774_090_240, Batch(32, 32), 1024),
        ("gpt2-xl", 1_557_686_400, Batch(16, 16), 1024),
        ("blueberry-79m", 79_059_840, Batch(16, 32), 1024),
        ("moe-tiny", 3_811_904, Batch(4, 4), 64),
        ("mixtral-8x7b", 46_702_792_704, Batch(1, 1), 4096),
        ("dense-100m", 102_435_840, Batch(1, 256), 2048),
        ("dense-500m", 499_916_800, Batch(1, 256), 2048),
        ("dense-1b", 1_019_221_504, Batch(1, 256), 2048),
        ("dense-5b", 5_121_629_184, Batch(1, 256), 2048),
    ],
)
def test_presets_have_their_documented_sizes(
    name: str, parameters: int, batch: Batch, sequence: int
) -> None:
    model = load_model(name)
    assert (total_parameters(model.shape), model.batch) == (parameters, batch)
    assert model.shape.seq_length == sequence


@pytest.mark.parametrize(
    ("name", "parameters", "without_embeddings", "active"),
    [
        ("dense-1m", 8_256_096, 1_003_104, 1_003_104),
        ("dense-4m", 18_502_848, 3_996_864, 3_996_864),
        ("dense-16m", 44_968_320, 15_956_352, 15_956_352),
        ("dense-64m", 121_787_136, 63_763_200, 63_763_200),
        ("moe-1m", 4_205_120, 985_664, 297_536),
        ("moe-4m", 10_376_320, 3_937_408, 1_184_896),
        ("moe-16m", 28_616_960, 15_739_136, 4_729_088),
        ("moe-64m", 88_691_200, 62_935_552, 18_895_360),
    ],
)
def test_the_sizes_of_the_size_axis_are_exact(
    name: str, parameters: int, without_embeddings: int, active: int
) -> None:
    shape = load_model(name).shape
    embeddings = (shape.padded_vocabulary(1) + shape.positions) * shape.hidden
    assert total_parameters(shape) == parameters
    assert parameters - embeddings == without_embeddings
    assert active_parameters(shape) - embeddings == active
    text = (ROOT / f"examples/{load_model(name).family}/models/{name}.args").read_text()
    assert f"{without_embeddings:,} parameters without embeddings" in text


def test_unknown_model_suggests_similar_names() -> None:
    with pytest.raises(UnknownModelError, match="no model 'gpt2-larg'; did you mean gpt2-large"):
        load_model("gpt2-larg")


@pytest.mark.parametrize("name", ["a" * 260, "../../gpt3/models/gpt2-large", "/etc/passwd", ""])
def test_a_text_that_is_no_name_is_an_unknown_model_and_no_path(name: str) -> None:
    with pytest.raises(UnknownModelError, match="no model"):
        load_model(name)


@pytest.mark.parametrize("name", ["t5", "bert-base", "megatron-bert"])
def test_a_model_that_is_no_gpt_is_refused_by_its_entry(name: str) -> None:
    with pytest.raises(
        UnknownModelError, match=r"is no GPT, .* pretrain_(t5|bert)\.py.* for example"
    ):
        load_model(name)


def test_preset_names_are_unique_and_every_preset_is_readable() -> None:
    assert len(set(model_names())) == len(model_names())
    assert {load_model(name).name for name in model_names()} == set(model_names())


def test_a_gated_mlp_without_a_size_is_two_thirds_rounded_down_to_64() -> None:
    shape = shape_from_flags("m", Flags([*DIMENSIONS, "--swiglu"]))
    assert (shape.gated, shape.ffn_hidden) == (True, 256)


def test_rotary_positions_have_no_table() -> None:
    learned = shape_from_flags("m", Flags([*DIMENSIONS, "--max-position-embeddings", "8"]))
    flags = [*DIMENSIONS, "--max-position-embeddings", "8", "--position-embedding-type", "rope"]
    assert (learned.positions, shape_from_flags("m", Flags(flags)).positions) == (8, 0)


def test_a_model_without_its_width_is_refused_by_the_flags_name() -> None:
    with pytest.raises(ValueError, match="Model 'm' lacks --hidden-size; add it"):
        shape_from_flags("m", Flags(["--num-layers", "2"]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-layers 0", "--num-layers 0; use 1 or more"),
        ("--hidden-size 0", "--hidden-size 0; use 1 or more"),
        ("--num-attention-heads 0", "--num-attention-heads 0; use 1 or more"),
        ("--num-attention-heads 5000", "--kv-channels 0; use 1 or more"),
        ("--group-query-attention --num-query-groups 3", "which 3 query groups do not divide"),
        ("--num-experts -2", "a negative number of experts"),
        ("--num-layers x", "--num-layers x is not a whole number"),
    ],
)
def test_impossible_shape_is_refused_by_its_flag(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shape_from_flags("m", Flags([*DIMENSIONS, *flags.split()]))


def test_a_negative_dimension_of_a_formula_and_an_unknown_recipe_are_refused() -> None:
    with pytest.raises(ValueError, match="--mtp-num-layers is -2; use 0 or more"):
        shape_from_flags("m", Flags([*DIMENSIONS, "--mtp-num-layers", "-2"]))
    with pytest.raises(
        ValueError, match="does not know the value foo of --fp8-recipe; use delayed"
    ):
        parse_fp8_recipe(Flags(["--fp8-format", "hybrid", "--fp8-recipe", "foo"]))


@pytest.mark.parametrize(("tensor", "rows"), [(1, 50304), (2, 50432), (8, 51200)])
def test_the_vocabulary_is_padded_as_megatron_pads_it(tensor: int, rows: int) -> None:
    assert load_model("gpt2-large").shape.padded_vocabulary(tensor) == rows


def test_only_model_flags_change_the_shape() -> None:
    tiny = load_model("gpt2-tiny")
    shallow = apply_flags_to_model(tiny, ("--num-layers=2", "--lr", "1e-3"))
    assert shallow.shape == replace(tiny.shape, layers=2)
    assert Flags(shallow.flags).text("--lr") != "1e-3"
    assert apply_flags_to_model(tiny, ("--lr", "1e-3")) is tiny


def test_flags_that_add_tensors_become_flags_of_the_model() -> None:
    tiny = load_model("gpt2-tiny")
    extra_flags = ("--softmax-type", "learnable", "--init-method-std", "0.5", "--clip-grad", "0")
    flags = Flags(apply_flags_to_model(tiny, extra_flags).flags)
    assert flags.text("--softmax-type") == "learnable"
    assert flags.text("--init-method-std") == "0.5"
    assert not flags.has("--clip-grad")
    gates = ("--attention-output-gate", "--moe-shared-expert-gate", "--moe-latent-size", "32")
    assert all(Flags(apply_flags_to_model(tiny, gates).flags).has(flag) for flag in gates[:-1])


def test_fp16_and_bf16_flags_replace_each_other() -> None:
    large = apply_flags_to_model(load_model("gpt2-large"), ("--bf16",))
    assert large.dtype == "bf16"
    assert "--fp16" not in large.flags


def test_args_file_is_a_model_named_after_the_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine.args"
    mine.write_text(" ".join(DIMENSIONS))
    assert load_model("mine", str(mine)).shape.layers == 2
    assert load_model("gpt2-tiny", str(mine)).shape.layers == 4
    with pytest.raises(
        UnknownModelError, match=r"To use a model of your own, .*/models/mine\.args, or"
    ):
        load_model("mine")
    with pytest.raises(UnknownModelError, match=r"There is no file gone/mine\.args; give"):
        load_model("mine", "gone/mine.args")


def test_model_has_the_dropout_of_its_family_unless_its_file_sets_another() -> None:
    assert load_model("moe-tiny").dropout == 0
    assert load_model("gpt2-large").dropout == 0.1
    assert load_model("gpt2-tiny").dropout == 0


def test_replaced_vocabulary_changes_only_the_embedding_and_its_flag() -> None:
    original = load_model("blueberry-79m")
    larger = replace_vocabulary(original, 50257)
    assert total_parameters(larger.shape) == 79_502_208
    assert Flags(larger.flags).integer("--vocab-size", 0) == 50257
    assert replace_vocabulary(original, 49152) is original


@pytest.mark.parametrize(
    ("flags", "balanced", "z_loss"),
    [
        ((), False, False),
        (("--moe-aux-loss-coeff", "0.0"), False, False),
        (("--moe-aux-loss-coeff", "0.01", "--moe-z-loss-coeff", "0.001"), True, True),
        (("--moe-aux-loss-coeff", "[0.01]"), True, False),
    ],
)
def test_a_routers_losses_are_read_from_its_coefficients(
    flags: tuple[str, ...], balanced: bool, z_loss: bool
) -> None:
    shape = shape_from_flags("m", Flags([*DIMENSIONS, "--num-experts", "8", *flags]))
    assert (shape.load_balancing, shape.router_z_loss) == (balanced, z_loss)


@pytest.mark.parametrize(
    ("flags", "window", "share"),
    [
        ("", 0, 0.0),
        ("--window-size 127,0", 128, 1.0),
        ("--window-size (127,0) --window-attn-skip-freq 2", 128, 0.5),
        ("--window-size 127,0 --window-attn-skip-freq [1,0]", 128, 0.5),
        ("--window-size 127,0 --window-attn-skip-freq 1", 128, 0.0),
        ("--window-size -1,0", 0, 0.0),
    ],
)
def test_sliding_window_of_layers_is_read_from_flags(flags: str, window: int, share: float) -> None:
    shape = shape_from_flags("m", Flags([*DIMENSIONS, *flags.split()]))
    assert (shape.window, shape.windowed_fraction) == (window, share)


def test_window_that_is_not_two_numbers_is_refused() -> None:
    with pytest.raises(
        ValueError, match="--window-size 128 is no pair of numbers; write a pair such as 127,0"
    ):
        shape_from_flags("m", Flags([*DIMENSIONS, "--window-size", "128"]))


def test_token_attends_only_to_tokens_of_its_window() -> None:
    plain = shape_from_flags("m", Flags(DIMENSIONS))
    # With windows of 3, 8 tokens attend to 1, 2, 3, 3, ... tokens: 21 in total, and twice the mean is 5.25.
    assert replace(plain, window=3, windowed_fraction=1.0).effective_attention_length(8) == 5.25
    assert (
        replace(plain, window=3, windowed_fraction=0.5).effective_attention_length(8)
        == (8 + 5.25) / 2
    )
    assert (
        replace(plain, window=8, windowed_fraction=1.0).effective_attention_length(8)
        == plain.effective_attention_length(8)
        == 8
    )


@pytest.mark.parametrize(
    ("flags", "clamped"),
    [
        ("--quick-geglu --activation-func-clamp-value 7", True),
        ("--swiglu --activation-func-clamp-value 7", False),
        ("--quick-geglu", False),
        ("--quick-geglu --activation-func-clamp-value 7 --use-transformer-engine-op-fuser", False),
    ],
)
def test_only_quick_geglu_has_separate_kernels_for_clamping(flags: str, clamped: bool) -> None:
    assert shape_from_flags("m", Flags([*DIMENSIONS, *flags.split()])).clamps_activations is clamped


def test_models_are_those_of_the_families_and_then_the_imported_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("b.v2/b.v2.args", "a/a.args", "a/other.args", "empty/notes.txt"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("--num-layers 1\n")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(model, "HUB", tmp_path)
    folders = [ROOT / "examples" / family / "models" for family in model.FAMILIES]
    shipped = [path.stem for folder in folders for path in sorted(folder.glob("*.args"))]
    assert shipped
    assert model_names() == (*shipped, "a", "b.v2")
    monkeypatch.setattr(model, "HUB", tmp_path / "none")
    assert model_names() == tuple(shipped)
