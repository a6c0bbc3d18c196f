"""Verify log probabilities: `make verify-logprob TRAIN=ep2pp2 SERVE=hf MODEL=moe-tiny`."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console

from parakit.artifacts.io import write_atomically
from parakit.artifacts.run import utc_stamp
from parakit.artifacts.verdict import EXIT_CODES
from parakit.config.errors import LaunchError
from parakit.config.files import relative_to_root
from parakit.config.flags import merge_flags
from parakit.config.huggingface import ConfigError, build_config
from parakit.config.model import find_model
from parakit.experiments.logprob.judge import judge_sides
from parakit.experiments.logprob.page import write_page
from parakit.experiments.logprob.sides import HF, SideError, Sides, SidesRequest
from parakit.experiments.verify.hf import write_random_tokens
from parakit.experiments.verify.verifier import ForkedRanks
from parakit.formatting.table import Column, Table, rich_table
from parakit.formatting.terminal import say
from parakit.launch import NO_TRANSFORMERS, Options, export_hf, fetch_model_folder
from parakit.logprob import Cause, LogprobVerdict

VERDICT_FILE = "logprob.json"
SEQUENCE_LENGTH = 64
"""Tokens per sequence of an imported model, unless EXTRA= sets another number or the model has fewer positions."""
_GATED_ACTIVATION = ("--swiglu",)
"""Flag without which a model with experts has no counterpart in transformers."""


def verify_logprob(
    train: str,
    serve: str,
    options: Options,
    console: Console,
    hf: str | None = None,
    ckpt: str | None = None,
    dtype: str | None = None,
    extra_b: tuple[str, ...] = (),
    json: bool = False,
) -> int:
    """Compare the log probabilities of a trainer and a serving engine, and print the verdict.

    Args:
        train: TRAIN=, the trainer's strategy.
        serve: SERVE=, the serving engine.
        options: Make variables.
        console: Shows the verdict.
        hf: HF=, the model that is served, and that the trainer imports unless CKPT= is set; None exports the
            trainer's weights.
        ckpt: CKPT=, the trainer's checkpoint; None takes the weights of HF= or the initial weights of MODEL=.
        dtype: DTYPE=, fp32 or bf16.
        extra_b: EXTRA_B=, Megatron's flags for the serving side alone.
        json: True prints the verdict as JSON.

    Returns:
        0 if the engines agree within rounding, else 1.

    Raises:
        ValueError: A side cannot run here.
    """
    if serve == HF and importlib.util.find_spec("transformers") is None:
        raise LaunchError(NO_TRANSFORMERS)
    folder = options.runs / f"{utc_stamp()}-verify-logprob"
    with _remove_captures_at_end(folder):
        request = _make_request(train, serve, options, folder, hf=hf, ckpt=ckpt)
        request = replace(request, is_bf16=dtype == "bf16", serve_flags=extra_b)
        ranks = ForkedRanks(request.options)
        try:
            sides = Sides(request, folder / "sides", ranks, Console(quiet=json))
            sides.prepare()
            verdict = judge_sides(sides)
            write_page(folder, verdict, sides)
        finally:
            ranks.close()
    write_atomically(
        folder / VERDICT_FILE, msgspec.json.format(msgspec.json.encode(verdict)).decode()
    )
    if json:
        print(msgspec.json.format(msgspec.json.encode(verdict)).decode())
    else:
        print_verdict(verdict, folder, console)
    return EXIT_CODES[verdict.outcome]


def print_verdict(verdict: LogprobVerdict, folder: Path, console: Console) -> None:
    """Print the sentence, the table of causes, the first module, and what to do."""
    say(console, verdict.sentence, "red" if verdict.causes else None)
    if verdict.causes:
        console.print(rich_table(Table(_COLUMNS, verdict.causes), console.width))
    for line in verdict.list_lines():
        say(console, line)
    say(console, f"→ {relative_to_root(folder)}/logprob.html")


@contextmanager
def _remove_captures_at_end(folder: Path) -> Iterator[None]:
    """Remove captured tensors at the end, and the whole folder after an error.

    After a `SideError` everything is kept, because its message names a log in the folder.
    """
    folder.mkdir(parents=True)
    try:
        yield
    except SideError:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder / "sides", ignore_errors=True)


def _make_request(
    train: str, serve: str, options: Options, folder: Path, *, hf: str | None, ckpt: str | None
) -> SidesRequest:
    """Return the request, with the model that both sides load.

    A checkpoint or a model of Hugging Face is imported into the folder. A model of the kit with experts gets the
    activation SwiGLU if transformers serves it, because transformers has no experts without it.

    Raises:
        LaunchError: No model or an unused one is named, or the weights cannot be converted.
    """
    from parakit.convert import ConversionProgress, import_model, read_source

    _refuse_unused_model(serve, options, hf=hf, ckpt=ckpt)
    if hf is None and ckpt is None:
        if options.model is None:
            raise LaunchError(
                "verify-logprob needs a model: MODEL=moe-tiny, HF=folder, or CKPT=checkpoint."
            )
        extra = _add_gated_experts(options) if serve == HF else options.extra
        return SidesRequest(train, serve, options.model, replace(options, extra=extra))
    served = fetch_model_folder(hf) if hf else None
    source = served
    if ckpt is not None:
        source = folder / "sides" / "exported"
        source.parent.mkdir(parents=True)
        export_hf(None, str(source), Console(quiet=True), ckpt)
    assert source is not None
    imported = read_source(source)
    models, name = folder / "sides" / "models", "imported"
    import_model(imported, name, ConversionProgress(), models)
    # The sample data set has the tokens of GPT-2, which another model's vocabulary may not have.
    data = options.data or str(
        write_random_tokens(folder / "sides" / "tokens", imported.shape.vocabulary)
    )
    length = ("--seq-length", str(min(SEQUENCE_LENGTH, imported.shape.seq_length)))
    return SidesRequest(
        train,
        serve,
        str(models / name / f"{name}.args"),
        replace(options, data=data, extra=(*length, *options.extra)),
        served_model=served or source,
    )


def _refuse_unused_model(serve: str, options: Options, *, hf: str | None, ckpt: str | None) -> None:
    """Raise a LaunchError if the make variables name a model that neither side would load."""
    source = "CKPT" if ckpt is not None else "HF"
    if options.model is not None and (hf is not None or ckpt is not None):
        raise LaunchError(
            f"MODEL={options.model} would not be loaded, because {source}= names the model; set one of them."
        )
    if hf is not None and ckpt is not None and serve != HF:
        raise LaunchError(
            f"HF={hf} would not be loaded: with CKPT=, SERVE={serve} serves the checkpoint's weights. Set SERVE=hf, or "
            "leave HF= out."
        )


def _add_gated_experts(options: Options) -> tuple[str, ...]:
    """Return EXTRA=, with SwiGLU added if transformers has a model with these flags only with SwiGLU."""
    model = find_model(str(options.model))
    flags = merge_flags(model.flags, options.extra)
    for extra in ((), _GATED_ACTIVATION):
        try:
            build_config(merge_flags(flags, extra), "float32")
        except ConfigError:
            continue
        return (*options.extra, *extra)
    return options.extra


def _describe_worst(cause: Cause) -> str:
    """Return the token with the largest difference, where it is, and both log probabilities."""
    return (
        f"{cause.worst_training_nats:.3f} against {cause.worst_serving_nats:.3f}: {cause.worst_token}, token "
        f"{cause.worst_position + 2} of sequence {cause.worst_sequence}"
    )


_COLUMNS = (
    Column[Cause]("cause", lambda cause: cause.kind, right=False),
    Column[Cause]("changed", lambda cause: cause.hypothesis, right=False, wraps=True),
    Column[Cause]("KL", lambda cause: cause.kl_nats, lambda value: f"{value:.1e}"),
    Column[Cause]("of the KL", lambda cause: cause.fraction_of_kl, lambda value: f"{value:.1%}"),
    Column[Cause]("mean |Δ|", lambda cause: cause.mean_abs_nats, lambda value: f"{value:.2g}"),
    Column[Cause]("99th |Δ|", lambda cause: cause.p99_abs_nats, lambda value: f"{value:.2g}"),
    Column[Cause]("worst token", _describe_worst, right=False, wraps=True, rank=1),
)
