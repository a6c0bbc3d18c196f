"""`verify-hf`: what it refuses, what it trains, and all families compared with transformers."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from parakit.config.errors import LaunchError
from parakit.config.flags import Flags
from parakit.config.run import Backend
from parakit.convert.hf.into_megatron import import_model, read_source
from parakit.convert.hf.progress import ConversionProgress
from parakit.convert.hf.random_model import CONFIGS, write_model
from parakit.experiments.verify.command import SharedReferences
from parakit.experiments.verify.pairs import LaunchPair, Verification, compose_pair
from parakit.launch.compose import Launch
from parakit.launch.job import parse_target
from parakit.launch.options import Options
from parakit.launch.preflight import check_launch
from tests.convert.hf.folders import GPT2
from tests.given import run


def verification(tmp_path: Path, strategy: str, extra: tuple[str, ...] = ()) -> Verification:
    if not (tmp_path / "mine").exists():
        import_model(
            read_source(write_model(tmp_path / "m", GPT2)), "mine", ConversionProgress(), tmp_path
        )
    model = str(tmp_path / "mine" / "mine.args")
    options = Options(runs=tmp_path / "runs", extra=extra, model=model)
    return compose_pair(LaunchPair(parse_target(f"train-{strategy}", options), "hf"))


def test_reference_is_transformers_with_the_padding_of_the_strategy(tmp_path: Path) -> None:
    split = verification(tmp_path, "tp2-mine-2cpu")
    assert split.reference.spec.backend is Backend.TRANSFORMERS
    assert split.mode == "Megatron against transformers, with the strategy's 1 padding row"
    flags = Flags(split.reference.flags)
    assert flags.text("--imported") == str(tmp_path / "mine")
    assert flags.text("--padded-vocabulary") == "132"
    assert not flags.has("--load")
    assert split.reference.entry.path == "src/parakit/convert/hf/reference.py"
    plain = verification(tmp_path, "pp2-mine-2cpu")
    assert plain.mode == "Megatron against transformers"


def test_strategies_with_the_same_reference_share_its_run(tmp_path: Path) -> None:
    shared = SharedReferences(tmp_path / "references")
    trained: list[tuple[str, str]] = []

    def compared(strategy: str, *extra: str) -> Path:
        options = Options(runs=tmp_path, extra=extra)
        pair = compose_pair(LaunchPair(parse_target(f"train-{strategy}-gpt2-tiny-2cpu", options)))
        scratch = tmp_path / f"{strategy}{len(trained)}"

        def train(part: str, launch: Launch) -> str:
            trained.append((part, launch.spec.name))
            (scratch / part).mkdir(parents=True)
            return ""

        scratch.mkdir()
        for part, launch in (("reference", pair.reference), ("strategy", pair.strategy)):
            assert shared.wrap(train, scratch)(part, launch) == ""
        return (scratch / "reference").resolve()

    assert compared("tp2") == compared("pp2")
    assert trained == [("reference", "baseline"), ("strategy", "tp2"), ("strategy", "pp2")]
    other = compared("pp2", "--lr", "1e-3")
    assert trained[3:] == [("reference", "baseline"), ("strategy", "pp2")]
    shared.remove()
    assert not other.exists()


def test_references_of_one_commit_are_shared_by_checkouts_in_other_folders(tmp_path: Path) -> None:
    job = parse_target("train-tp2-gpt2-tiny-2cpu", Options(runs=tmp_path))
    reference = compose_pair(LaunchPair(job)).reference
    trained: list[str] = []

    def train_in(checkout: str, store: SharedReferences) -> None:
        entry = replace(reference.entry, path=f"{checkout}/pretrain_gpt.py")
        scratch = tmp_path / f"scratch-{len(trained)}-{checkout}"
        scratch.mkdir(exist_ok=True)

        def train(part: str, launch: Launch) -> str:
            trained.append(checkout)
            (scratch / part).mkdir()
            (scratch / part / "tensors.bin").write_bytes(b"12345")
            return ""

        store.wrap(train, scratch)("reference", replace(reference, entry=entry))
        assert (scratch / "reference" / "tensors.bin").read_bytes() == b"12345"

    by_commit = SharedReferences(tmp_path / "references", megatron="c1")
    train_in("first", by_commit)
    train_in("second", by_commit)
    assert trained == ["first"]
    train_in("third", replace(by_commit, megatron="c2"))
    train_in("fourth", replace(by_commit, megatron=""))
    assert trained == ["first", "third", "fourth"]


def test_reference_above_the_size_limit_is_used_and_not_stored(tmp_path: Path) -> None:
    job = parse_target("train-tp2-gpt2-tiny-2cpu", Options(runs=tmp_path))
    reference = compose_pair(LaunchPair(job)).reference
    for limit, is_stored in ((4, False), (5, True)):
        store = SharedReferences(tmp_path / f"references-{limit}", max_bytes=limit)
        scratch = tmp_path / f"scratch-{limit}"

        def train(part: str, launch: Launch, scratch: Path = scratch) -> str:
            (scratch / part).mkdir(parents=True)
            (scratch / part / "tensors.bin").write_bytes(b"12345")
            return ""

        store.wrap(train, scratch)("reference", reference)
        assert (scratch / "reference" / "tensors.bin").read_bytes() == b"12345"
        assert store.folder.is_dir() is is_stored


def test_model_that_was_not_imported_has_no_transformers_reference(tmp_path: Path) -> None:
    options = Options(runs=tmp_path, dry_run=True)
    composed = compose_pair(LaunchPair(parse_target("train-tp2-gpt2-tiny-2cpu", options), "hf"))
    with pytest.raises(LaunchError, match="gpt2-tiny was not; import a model"):
        check_launch(composed.reference)


def test_unknown_strategy_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="STRATEGIES= holds nonsense"):
        run("verify-hf", {"RUNS": str(tmp_path), "STRATEGIES": "tp2 nonsense"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is not None, reason="transformers is installed"
)
def test_missing_transformers_is_refused_with_the_install_command(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="make setup-hf"):
        run("verify-hf", {"RUNS": str(tmp_path)})


@pytest.mark.slow
def test_all_families_match_transformers_and_an_injected_bug_differs(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    here = {"RUNS": str(tmp_path)}
    # Megatron splits experts by TP only with SP.
    assert run("verify-hf", {**here, "STRATEGIES": "baseline sp2 pp2"}) == 0
    verdicts = list(tmp_path.glob("*-verify-hf/*/verify/*/verdict.json"))
    assert len(verdicts) == 3 * len(CONFIGS)
    assert {json.loads(path.read_text())["verdict"] for path in verdicts} == {"held"}
    source = write_model(tmp_path / "m", GPT2)
    exact = {**here, "EXTRA": "--no-bias-gelu-fusion"}  # erf, not tanh
    assert run("verify-hf", {**exact, "STRATEGIES": "baseline", "HF": str(source)}) == 1
