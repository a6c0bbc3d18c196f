"""The model that a run states: its flags of the roles *shape* and *architecture*.

A log states the flags of the arguments that it prints, a run of the kit those of its command line. Two
runs train the same model if no flag differs. A flag that a complete list leaves out has Megatron's
default; a flag that a shortened list leaves out is not known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from parakit.artifacts.identity import parse_flag_values
from parakit.artifacts.run import RunRecord
from parakit.config.flag_table import FLAGS, KnownFlag, argument_names, flags_with_role
from parakit.config.flags import Flags, drop_flags, values_by_flag
from parakit.config.model import GPT2_VOCABULARY, default_ffn_hidden
from parakit.config.run import flags_from_printed_arguments
from parakit.config.strategy import strategy_flags
from parakit.logs.printed import FEWEST_OF_ALL

type Value = bool | float | str | None
"""Value of a flag: a number, a text, or whether a switch is on; None if the flag has no value."""

REQUIRED_MODEL_FLAGS: Final = (
    "--num-layers",
    "--hidden-size",
    "--num-attention-heads",
    "--seq-length",
)
"""Flags without which no model is defined."""
_SWITCHED_OFF: Final = ("", "None", "False")
_LAYOUT_OR_CODE: Final = frozenset(
    {
        # Padding follows from TP, and the vocabulary is compared separately.
        *("--make-vocab-size-divisible-by", "--vocab-size"),
        # The report compares it as "sequence length".
        "--seq-length",
        # It chooses one of two implementations of the same layers, and newer Megatrons ignore it.
        "--use-mcore-models",
        # Other names of flags that are compared; see `_unify_names`.
        *("--group-query-attention", "--use-rotary-position-embeddings", "--layernorm-epsilon"),
    }
)
_COMPARED: Final = tuple(
    FLAGS[name] for name in sorted(flags_with_role("shape", "architecture") - _LAYOUT_OR_CODE)
)
_ORDER: Final = {name: position for position, name in enumerate(FLAGS)}
_PRINTED_NAMES: Final = {"--disable-bias-linear": "add_bias_linear"}
"""Flags whose printed argument has another name and the opposite value."""


@dataclass(frozen=True)
class ModelDifference:
    """A flag with different values in two models, or a flag that one of them does not state."""

    flag: str
    reference: str
    """The reference's value as text; empty if its log does not state the flag."""
    other: str
    """The other model's value as text; empty if its log does not state the flag."""

    @property
    def is_known(self) -> bool:
        """True if both runs state the flag, so that their models differ."""
        return bool(self.reference and self.other)


@dataclass(frozen=True)
class StatedModel:
    """The values of a model's flags that a run states. Other flags are unknown."""

    values: Mapping[str, Value]
    """Values by flag. A flag that is not stated has Megatron's default, or the value that Megatron derives.

    Flags without effect are left out, such as those of experts in a dense model."""
    stated: frozenset[str]
    """Flags whose values are certain: they are in the list of arguments, or missing in a complete list."""
    lacking: tuple[str, ...]
    """Flags that define a model and that the run does not state."""
    vocabulary: range | None
    """Possible sizes of the vocabulary: one, or all that give the printed padded size; None if unknown."""

    def differences(self, other: StatedModel) -> list[ModelDifference]:
        """Return the flags that differ between two models, in the order of the flag table; the vocabulary comes last.

        The list is empty if no flag differs.
        """
        if self == other:
            return []
        differences = []
        for name in self.values.keys() & other.values.keys():
            if self.values[name] == other.values[name]:
                continue
            texts = (self._format_value(name), other._format_value(name))
            if any(texts):
                differences.append(ModelDifference(name, *texts))
        differences.sort(key=lambda difference: _ORDER[difference.flag])
        return differences + self._compare_vocabularies(other)

    def _format_value(self, name: str) -> str:
        """Return the value of a flag as text; empty if the run does not state it."""
        if name not in self.stated:
            return ""
        value = self.values[name]
        return f"{value:.12g}" if isinstance(value, float) else str(value)

    def _compare_vocabularies(self, other: StatedModel) -> list[ModelDifference]:
        """Return the difference of the vocabularies as a list; empty if both models may have the same vocabulary.

        It is also empty if both sizes are unknown.
        """
        sizes, other_sizes = self.vocabulary, other.vocabulary
        if sizes is None and other_sizes is None:
            return []
        if sizes and other_sizes:
            first = max(sizes[0], other_sizes[0])
            last = min(sizes[-1], other_sizes[-1])
            if first <= last:
                return []
        reference_text, other_text = map(_format_vocabulary_size, (sizes, other_sizes))
        return [ModelDifference("--vocab-size", reference_text, other_text)]


def find_recorded_model(record: RunRecord) -> StatedModel:
    """Return the model that a run of this kit records. Flags that its strategy adds are left out."""
    # Torch FSDP2 unties the embeddings, which belongs to the strategy: its losses are compared instead.
    flags_of_strategy = values_by_flag(strategy_flags(record.spec.parallelism))
    argv = drop_flags(record.argv, flags_of_strategy)
    size = record.spec.shape.vocabulary
    vocabulary = range(size, size + 1) if size else None
    values_by_name = parse_flag_values(argv)
    printed = {name.lstrip("-").replace("-", "_"): text for name, text in values_by_name.items()}
    if "--disable-bias-linear" in values_by_name:
        printed["add_bias_linear"] = "False"
    return _make_model(printed, Flags(argv), is_complete=True, vocabulary=vocabulary)


def find_printed_model(arguments: Mapping[str, str]) -> StatedModel:
    """Return the model that printed arguments state, which have Megatron's present names."""
    # GPT-NeoX prints a complete list too, but not of Megatron's flags.
    is_complete = len(arguments) >= FEWEST_OF_ALL and "kv_channels" in arguments
    flags = Flags(flags_from_printed_arguments(arguments))
    return _make_model(arguments, flags, is_complete, _find_vocabulary_sizes(arguments))


def _make_model(
    arguments: Mapping[str, str], flags: Flags, is_complete: bool, vocabulary: range | None
) -> StatedModel:
    """Return the model that arguments state.

    Args:
        arguments: Arguments by their printed names.
        flags: The same arguments as flags.
        is_complete: True if the list has all arguments, so that a missing one has its default.
        vocabulary: Possible sizes of the vocabulary.
    """
    arguments = _unify_names(arguments)
    values: dict[str, Value] = {}
    stated = set()
    for flag in _COMPARED:
        name = _PRINTED_NAMES.get(flag.name, flag.name.removeprefix("--").replace("-", "_"))
        text = arguments.get(name)
        if not _has_effect(flag, arguments, flags, is_stated=text is not None):
            continue
        if text is not None:
            values[flag.name] = _parse_value(flag, text)
        elif flag.kind in ("on", "off"):
            values[flag.name] = False
        elif flag.name == "--num-query-groups":
            values[flag.name] = None  # `_derive_values` sets the number of heads.
        else:
            values[flag.name] = _parse_number(flag.default)
        if text is not None or is_complete:
            stated.add(flag.name)
    _derive_values(values)
    lacking = tuple(
        name for name in REQUIRED_MODEL_FLAGS if not argument_names([name]) & arguments.keys()
    )
    return StatedModel(values, frozenset(stated), lacking, vocabulary)


def _unify_names(arguments: Mapping[str, str]) -> dict[str, str]:
    """Return the arguments, with one common name for each setting that can be printed under two names."""
    unified = dict(arguments)
    heads = unified.get("num_attention_heads", "")
    if unified.get("use_rotary_position_embeddings") == "True":
        unified["position_embedding_type"] = "rope"
    if "layernorm_epsilon" in unified:
        unified.setdefault("norm_epsilon", unified["layernorm_epsilon"])
    # Without grouped queries every head has its own keys and values, even if another number is printed.
    grouped = unified.get("group_query_attention")
    if grouped in _SWITCHED_OFF:
        unified["num_query_groups"] = heads
    elif grouped is None and unified.get("num_query_groups") in ("1", *_SWITCHED_OFF):
        del unified["num_query_groups"]
    return unified


def _has_effect(
    flag: KnownFlag, arguments: Mapping[str, str], flags: Flags, *, is_stated: bool
) -> bool:
    """Return True if a flag can have an effect together with the other arguments of the list.

    A stated flag also gives True if the switch that it depends on is missing, because the list may be shortened.
    """
    if flag.name == "--num-query-groups":
        return True
    if flag.name == "--max-position-embeddings":
        kind = arguments.get("position_embedding_type", "learned_absolute")
        return kind == "learned_absolute"
    if flags.applies(flag):
        return True
    # A shortened list may have lost the switch that the flag belongs to.
    switches = argument_names(need.partition("=")[0] for need in flag.only_with)
    return is_stated and not switches & arguments.keys()


def _parse_value(flag: KnownFlag, text: str) -> Value:
    """Return the value of a printed argument, in one form for all ways of writing a list or a number."""
    if flag.kind in ("on", "off"):
        is_true = text not in _SWITCHED_OFF
        return is_true is (flag.name not in _PRINTED_NAMES)
    plain = " ".join(re.sub(r"[][',\"()]", " ", text).split())
    return None if plain in _SWITCHED_OFF else _parse_number(plain)


def _parse_number(value: object) -> Value:
    """Return a value as a float if it is a number, else as text; None stays None."""
    if value is None:
        return None
    try:
        return float(str(value))
    except ValueError:
        return str(value)


def _derive_values(values: dict[str, Value]) -> None:
    """Fill in, in place, flags without a value that Megatron would derive from other flags (`validate_args`)."""
    hidden, heads = values["--hidden-size"], values["--num-attention-heads"]
    _set_if_none(values, "--num-query-groups", heads)
    if isinstance(hidden, float):
        usual = float(default_ffn_hidden(int(hidden), swiglu=values["--swiglu"] is True))
        _set_if_none(values, "--ffn-hidden-size", usual)
        if isinstance(heads, float) and heads >= 1:
            _set_if_none(values, "--kv-channels", hidden // heads)
    values["--num-experts"] = values["--num-experts"] or None
    _set_if_none(values, "--moe-ffn-hidden-size", values["--ffn-hidden-size"])
    _set_if_none(values, "--encoder-num-layers", values["--num-layers"])
    _set_if_none(values, "--embedding-init-method-std", values["--init-method-std"])


def _set_if_none(values: dict[str, Value], name: str, value: Value) -> None:
    """Set a flag that has an effect and no value, in place."""
    if name in values and values[name] is None:
        values[name] = value


def _format_vocabulary_size(sizes: range | None) -> str:
    """Return the size that a log prints: the tokenizer's, else the padded one; empty if unknown."""
    if sizes is None:
        return ""
    return str(sizes[0] if len(sizes) <= 2 else sizes[-1])


def _find_vocabulary_sizes(arguments: Mapping[str, str]) -> range | None:
    """Return the possible sizes of the vocabulary as a range; None if nothing is known.

    The range has one or two sizes if the tokenizer's size is printed. Otherwise it has all sizes that are padded
    to the printed size.
    """
    size = arguments.get("vocab_size", "")
    if not size.isdecimal() and arguments.get("tokenizer_type") == "GPT2BPETokenizer":
        size = str(GPT2_VOCABULARY)
    if size.isdecimal():
        # Up to 0.17 Megatron's NullTokenizer adds the end of a document to the size that is printed; a
        # shortened list may not say which tokenizer it is.
        added = arguments.get("tokenizer_type", "NullTokenizer") == "NullTokenizer"
        return range(int(size), int(size) + 1 + added)
    padded = arguments.get("padded_vocab_size", "")
    if not padded.isdecimal():
        return None
    multiple = arguments.get("make_vocab_size_divisible_by", "")
    ranks = arguments.get("tensor_model_parallel_size", "")
    # Megatron pads to a multiple of 128 for each rank of TP.
    step = int(multiple) if multiple.isdecimal() else 128
    step *= int(ranks) if ranks.isdecimal() else 1
    return range(max(1, int(padded) - max(1, step) + 1), int(padded) + 1)
