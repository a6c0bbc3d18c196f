"""Import and export: bit for bit, in bounded memory, and refused by name before anything is written."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from parakit.artifacts.torch_dist import PieceReader, read_metadata
from parakit.checkpoint.checks import find_problems
from parakit.checkpoint.compare import compare_weights
from parakit.checkpoint.contents import read_contents
from parakit.config.files import ROOT
from parakit.config.flags import Flags
from parakit.config.huggingface import flags_model_type
from parakit.config.model import find_model
from parakit.convert.hf import progress
from parakit.convert.hf.from_megatron import export_model
from parakit.convert.hf.into_megatron import import_model, read_import, read_source
from parakit.convert.hf.progress import ConversionProgress
from parakit.convert.hf.random_model import write_model
from parakit.convert.hf.tensor_files import FILE, INDEX, TensorFolder, TensorHeader, write_tensors
from parakit.launch.hub import export_hf
from tests.convert.hf.checkpoints import CHECKPOINT, state_arguments
from tests.convert.hf.folders import FAMILIES, GPT2, LLAMA, LLAMA3_SCALING


def imported(source: Path, hub: Path, name: str = "mine") -> Path:
    import_model(read_source(source), name, ConversionProgress(), hub)
    return hub / name


def exported(
    folder: Path, target: Path, as_imported: bool = True, shard_bytes: int = 10**9
) -> Path:
    model = find_model(str(folder / f"{folder.name}.args"))
    import_folder = folder if as_imported else None
    export_model(
        folder / CHECKPOINT,
        model.flags,
        model.shape,
        import_folder,
        target,
        ConversionProgress(),
        shard_bytes,
    )
    return target


def assert_same_bits(first: Path, other: Path) -> None:
    first_folder, other_folder = TensorFolder(first), TensorFolder(other)
    assert first_folder.tensors == other_folder.tensors  # names, shapes and types
    for name in first_folder.tensors:
        bits = [folder.read(name).view(torch.uint8) for folder in (first_folder, other_folder)]
        assert torch.equal(*bits), name


@pytest.mark.parametrize(
    ("config", "dtype", "prefix"),
    [
        (GPT2, torch.float32, None),
        (GPT2, torch.float32, ""),
        ({**GPT2, "tie_word_embeddings": False}, torch.float16, None),
        (LLAMA, torch.bfloat16, None),
        ({**LLAMA, "tie_word_embeddings": True, "head_dim": 6}, torch.float32, None),
    ],
    ids=["gpt2", "gpt2-bare", "gpt2-untied-fp16", "llama-bf16", "llama-tied-wide-heads"],
)
@pytest.mark.parametrize("shard_bytes", [10**9, 700])
def test_imported_model_is_exported_bit_for_bit(
    tmp_path: Path, config: dict[str, Any], dtype: torch.dtype, prefix: str | None, shard_bytes: int
) -> None:
    source = write_model(tmp_path / "source", config, dtype, shard_bytes, prefix)
    folder = imported(source, tmp_path / "hub")
    back = exported(folder, tmp_path / "back", shard_bytes=shard_bytes)
    assert_same_bits(source, back)
    assert json.loads((back / "config.json").read_text()).items() >= config.items()
    again = imported(back, tmp_path / "again")
    files = [model / CHECKPOINT / "__0_0.distcp" for model in (folder, again)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_model_that_was_not_imported_gets_a_config_from_its_flags(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", {**LLAMA, "rope_scaling": LLAMA3_SCALING})
    folder = imported(source, tmp_path / "hub")
    back = exported(folder, tmp_path / "back", as_imported=False)
    assert_same_bits(source, back)
    config = json.loads((back / "config.json").read_text())
    assert config["rope_scaling"] == LLAMA3_SCALING
    again = find_model(str(imported(back, tmp_path / "again") / "mine.args"))
    assert again.shape == find_model(str(folder / "mine.args")).shape


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_converted_both_ways_to_the_same_bits(tmp_path: Path, family: str) -> None:
    """With the config of the import, and with one that is made from Megatron's flags."""
    config = FAMILIES[family]
    source = write_model(tmp_path / "source", config, torch.bfloat16)
    folder = imported(source, tmp_path / "hub")
    assert find_problems(read_contents(folder)) == ()
    back = exported(folder, tmp_path / "back")
    assert_same_bits(source, back)
    assert json.loads((back / "config.json").read_text()).items() >= config.items()
    from_flags = exported(folder, tmp_path / "flags", as_imported=False)
    if (
        family != "phi3"
    ):  # Its flags are those of a Llama, whose queries, keys and values are three tensors.
        assert_same_bits(source, from_flags)
    written = json.loads((from_flags / "config.json").read_text())
    assert written["model_type"] == flags_model_type(config["model_type"])
    assert written.get("rope_scaling") == config.get("rope_scaling")
    again = imported(from_flags, tmp_path / "again")
    models = [find_model(str(model / "mine.args")) for model in (folder, again)]
    assert models[0].shape == models[1].shape
    files = [model / CHECKPOINT / "__0_0.distcp" for model in (folder, again)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    "config", [LLAMA, GPT2, FAMILIES["mixtral"]], ids=["llama", "gpt2", "mixtral"]
)
@pytest.mark.parametrize("states_vocabulary", [True, False])
def test_any_checkpoint_of_megatron_is_exported_by_its_arguments(
    tmp_path: Path, config: dict[str, Any], states_vocabulary: bool
) -> None:
    source = write_model(tmp_path / "source", config)
    folder = imported(source, tmp_path / "hub")
    state_arguments(folder, states_vocabulary)
    (tmp_path / "elsewhere").mkdir()
    moved = (folder / "checkpoint").rename(tmp_path / "elsewhere" / "checkpoints")
    assert export_hf(None, str(tmp_path / "back"), Console(quiet=True), ckpt=str(moved)) == 0
    if states_vocabulary or config is not GPT2:
        assert_same_bits(source, tmp_path / "back")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    rows = config["vocab_size"] if states_vocabulary else -(-config["vocab_size"] // 128) * 128
    assert (written["model_type"], written["vocab_size"]) == (config["model_type"], rows)


def test_a_checkpoint_that_cannot_be_exported_is_refused_with_a_way_out(tmp_path: Path) -> None:
    console, target = Console(quiet=True), str(tmp_path / "back")
    with pytest.raises(ValueError, match=r"either RUN= .* or CKPT="):
        export_hf(None, target, console)
    with pytest.raises(ValueError, match=r"either RUN= .* or CKPT="):
        export_hf("runs/one", target, console, ckpt="checkpoints")
    with pytest.raises(ValueError, match=r"is no folder; name one"):
        export_hf(None, target, console, ckpt=str(tmp_path / "nowhere"))
    folder = imported(write_model(tmp_path / "source", LLAMA), tmp_path / "hub")
    with pytest.raises(
        ValueError, match=r"holds no arguments that define a model.*Megatron-Bridge"
    ):
        export_hf(None, target, console, ckpt=str(folder / "checkpoint"))
    with pytest.raises(ValueError, match=r"of the format huggingface.*Megatron-Bridge"):
        export_hf(None, target, console, ckpt=str(tmp_path / "source"))
    assert not Path(target).exists()


def test_padding_rows_are_copies_of_the_last_row_for_any_tensor_parallel_layout(
    tmp_path: Path,
) -> None:
    source = write_model(tmp_path / "source", GPT2)  # 131 entries
    folder = imported(source, tmp_path / "hub")
    stored = read_metadata(folder / CHECKPOINT).tensors["embedding.word_embeddings.weight"]
    with PieceReader(folder / CHECKPOINT) as reader:
        rows = reader.read_tensor(stored)
    assert rows.shape == (256, 8)
    assert torch.equal(rows[131:], rows[130:131].expand(125, -1))
    flags = Flags(find_model(str(folder / "mine.args")).flags)
    assert flags.text("--make-vocab-size-divisible-by") == "1"
    assert read_import(folder).padding_rows == 125


def test_tokenizer_files_are_copied_on_import_and_export(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", GPT2)
    tokenizer = {"model": {"vocab": {"a": 0, "b": 130}}, "added_tokens": []}
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    (source / "training_args.bin").write_bytes(b"not ours")
    back = exported(imported(source, tmp_path / "hub"), tmp_path / "back")
    assert json.loads((back / "tokenizer.json").read_text()) == tokenizer
    assert not (back / "training_args.bin").exists()


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    held = TensorFolder(folder)
    tensors = {name: held.read(name) for name in held.tensors}
    change(tensors)
    described = [TensorHeader(n, tuple(t.shape), t.dtype) for n, t in tensors.items()]
    write_tensors(folder, described, iter(tensors.values()))


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: rewritten(folder, lambda tensors: tensors.__delitem__(name))


def put(name: str, *shape: int) -> Callable[[Path], None]:
    return lambda folder: rewritten(
        folder, lambda tensors: tensors.update({name: torch.ones(shape)})
    )


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def token_beyond(folder: Path) -> None:
    tokenizer = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "x", "id": 131}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (drop("transformer.h.1.ln_2.bias"), "lacks transformer.h.1.ln_2.bias"),
        (put("transformer.h.0.crossattention.c_attn.weight", 2, 2), "another architecture"),
        (put("transformer.h.1.mlp.c_fc.weight", 32, 8), r"shape \[32, 8\].*asks for \[8, 32\]"),
        (put("lm_head.weight", 131, 8), "set tie_word_embeddings to false"),
        (cut, "model.safetensors cannot be read"),
        (only_pickle, "pytorch_model.bin is a pickle"),
        (token_beyond, "token id 131, and the model a vocabulary of 131"),
        (lambda folder: (folder / "config.json").unlink(), "config.json cannot be read"),
    ],
    ids=["missing", "extra", "shape", "tied", "truncated", "pickle", "tokenizer", "config"],
)
def test_a_folder_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], None], sentence: str
) -> None:
    source = write_model(tmp_path / "source", GPT2)
    damage(source)
    with pytest.raises(ValueError, match=sentence):
        read_source(source)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", GPT2, shard_bytes=700)
    next(source.glob("model-00002-*")).unlink()
    with pytest.raises(ValueError, match=rf"lacks model-00002-.*{INDEX} names"):
        read_source(source)


def test_masks_of_older_files_and_a_stored_copy_of_a_tied_output_layer_are_left_out(
    tmp_path: Path,
) -> None:
    source = write_model(tmp_path / "source", GPT2, prefix="")

    def as_on_the_hub(tensors: dict[str, torch.Tensor]) -> None:
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
        tensors["lm_head.weight"] = tensors["wte.weight"]

    rewritten(source, as_on_the_hub)
    assert read_source(source).ignored == ("h.0.attn.bias",)


@pytest.mark.parametrize("name", ["gpt2-tiny", "a b", "../up", ".hidden"])
def test_a_name_that_targets_cannot_have_is_refused(tmp_path: Path, name: str) -> None:
    source = read_source(write_model(tmp_path / "source", GPT2))
    with pytest.raises(ValueError, match="NAME="):
        import_model(source, name, ConversionProgress())


def test_existing_folder_and_full_disk_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model(tmp_path / "source", GPT2)
    folder = imported(source, tmp_path / "hub")
    with pytest.raises(ValueError, match="mine exists already; remove it"):
        imported(source, tmp_path / "hub")
    with pytest.raises(ValueError, match=r"TO=.*hub exists already"):
        exported(folder, tmp_path / "hub")
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(progress.shutil, "disk_usage", lambda _: usage)
    for convert in (imported, exported):
        with pytest.raises(ValueError, match=r"needs 64\.\d+ MiB, and .* has 1 MiB free"):
            convert(source if convert is imported else folder, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_an_error_while_writing_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = read_source(write_model(tmp_path / "source", GPT2))

    def failing(_: TensorFolder, name: str) -> torch.Tensor:
        raise OSError(28, "No space left on device", name)

    monkeypatch.setattr(TensorFolder, "read", failing)
    with pytest.raises(OSError, match="No space left"):
        import_model(source, "mine", ConversionProgress(), tmp_path / "hub")
    assert list((tmp_path / "hub").iterdir()) == []


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = imported(write_model(tmp_path / "source", GPT2), tmp_path / "hub")
    arguments = list(find_model(str(folder / "mine.args")).flags)
    arguments[arguments.index("--num-layers") + 1] = "3"
    (folder / "mine.args").write_text(" ".join(arguments))
    with pytest.raises(ValueError, match=r"shape \[2, 8\], and the run's model has \[3, 8\]"):
        exported(folder, tmp_path / "back")


def test_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = imported(write_model(tmp_path / "source", GPT2), tmp_path / "hub")
    (folder / CHECKPOINT / ".metadata").write_bytes(b"x")
    with pytest.raises(ValueError, match="no whole checkpoint"):
        exported(folder, tmp_path / "back")


_MEASURED = """
import resource, sys
from pathlib import Path
from tests.convert.hf.test_conversion import exported, imported
def grown(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
small = imported(Path(sys.argv[1]), Path(sys.argv[3]), "small")
exported(small, Path(sys.argv[3]) / "small-back")
before = grown()
large = imported(Path(sys.argv[2]), Path(sys.argv[3]), "large")
print(grown() - before)
exported(large, Path(sys.argv[3]) / "large-back")
print(grown() - before)
"""


@pytest.mark.slow
def test_memory_is_bounded_by_a_few_of_the_largest_tensor(tmp_path: Path) -> None:
    width = 512  # 4 MiB the largest tensor, 100 MiB all of them
    wide = {**LLAMA, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 10}
    sources = [
        write_model(tmp_path / "small", LLAMA),
        write_model(tmp_path / "large", wide, shard_bytes=30 * 10**6),
    ]
    held = sum(file.stat().st_size for file in sources[1].glob("*.safetensors"))
    arguments = [*map(str, sources), str(tmp_path / "hub")]
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    largest = 2 * width * width * 4 * 2
    assert held > 20 * largest / 2
    assert all(int(line) < 6 * largest for line in done.stdout.split()), done.stdout


@pytest.mark.parametrize("config", [GPT2, LLAMA])
def test_an_import_is_the_same_model_as_its_source_and_a_changed_one_is_not(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    source = write_model(tmp_path / "source", config)
    checkpoint = read_contents(imported(source, tmp_path / "hub") / CHECKPOINT)
    assert all(relation.is_same for relation in compare_weights(read_contents(source), checkpoint))
    doubled = {name: 2 * values for name, values in load_file(source / FILE).items()}
    save_file(doubled, source / FILE)
    relations = compare_weights(read_contents(source), checkpoint)
    assert {(relation.relation, relation.detail[-3:]) for relation in relations} == {
        ("scaled", "0.5")
    }


@pytest.mark.usefixtures("within_a_minute")
def test_pipes_in_place_of_a_config_and_of_an_import_s_record_are_named(tmp_path: Path) -> None:
    for name in ("config.json", "import.json"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=r"config\.json cannot be read: it is no regular file"):
        read_source(tmp_path)
    with pytest.raises(ValueError, match=r"import\.json cannot be read .*it is no regular file"):
        read_import(tmp_path)
