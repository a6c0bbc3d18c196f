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
"""A number, a text, whether a switch is given, or None for nothing."""

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
        # Padding follows TP; the vocabulary is compared by itself.
        *("--make-vocab-size-divisible-by", "--vocab-size"),
        # The report compares it as "sequence length".
        "--seq-length",
        # It chooses one of two implementations of the same layers, and newer Megatrons ignore it.
        "--use-mcore-models",
        # Other names of flags that are compared: see `_under_one_name`.
        *("--group-query-attention", "--use-rotary-position-embeddings", "--layernorm-epsilon"),
    }
)
_COMPARED: Final = tuple(
    FLAGS[name] for name in sorted(flags_with_role("shape", "architecture") - _LAYOUT_OR_CODE)
)
_ORDER: Final = {name: place for place, name in enumerate(FLAGS)}
_PRINTED_NAMES: Final = {"--disable-bias-linear": "add_bias_linear"}
"""Flags whose printed argument says the opposite under another name."""


@dataclass(frozen=True)
class ModelDifference:
    """A flag that has not the same value in two models, or that one of them does not state."""

    flag: str
    reference: str
    """The reference's value as text; empty where its log does not state the flag."""
    other: str

    @property
    def is_known(self) -> bool:
        """True if both runs state the flag, so that their models differ."""
        return bool(self.reference and self.other)


@dataclass(frozen=True)
class StatedModel:
    """The values of a model's flags, as far as a run states them."""

    values: Mapping[str, Value]
    """By flag; Megatron's default, or what it derives, where a flag is not stated.

    Flags that say nothing beside the others, such as the experts' of a dense model, are left out."""
    stated: frozenset[str]
    """Flags that the run states, by name or by leaving them out of a complete list."""
    lacking: tuple[str, ...]
    """Flags without which no model is defined and that the run does not state."""
    vocabulary: range | None
    """The sizes that the vocabulary may have: one, or all that are padded alike. None is unknown."""

    def differences(self, other: StatedModel) -> list[ModelDifference]:
        """Return what differs between this model and the other, in the flags' order."""
        if self == other:
            return []
        found = []
        for name in self.values.keys() & other.values.keys():
            if self.values[name] == other.values[name]:
                continue
            texts = (self._text(name), other._text(name))
            if any(texts):
                found.append(ModelDifference(name, *texts))
        found.sort(key=lambda difference: _ORDER[difference.flag])
        return found + self._difference_of_vocabulary(other)

    def _text(self, name: str) -> str:
        if name not in self.stated:
            return ""
        value = self.values[name]
        return f"{value:.12g}" if isinstance(value, float) else str(value)

    def _difference_of_vocabulary(self, other: StatedModel) -> list[ModelDifference]:
        """Return the vocabulary's difference: no size that pads to the one pads to the other."""
        one, two = self.vocabulary, other.vocabulary
        if one is None and two is None:
            return []
        if one and two and max(one[0], two[0]) <= min(one[-1], two[-1]):
            return []
        return [ModelDifference("--vocab-size", *map(_printed_size, (one, two)))]


def find_recorded_model(record: RunRecord) -> StatedModel:
    """Return the model of a run of the kit, without the flags that its strategy needs."""
    # Torch FSDP2 unties the embeddings: it is judged as a strategy, by the losses.
    of_strategy = values_by_flag(strategy_flags(record.spec.parallelism))
    words = drop_flags(record.argv, of_strategy)
    sizes = record.spec.shape.vocabulary
    vocabulary = range(sizes, sizes + 1) if sizes else None
    given = parse_flag_values(words)
    printed = {name.lstrip("-").replace("-", "_"): text for name, text in given.items()}
    if "--disable-bias-linear" in given:
        printed["add_bias_linear"] = "False"
    return _model(printed, Flags(words), is_complete=True, vocabulary=vocabulary)


def find_printed_model(arguments: Mapping[str, str]) -> StatedModel:
    """Return the model of a foreign log's printed arguments, under Megatron's present names."""
    # GPT-NeoX prints a complete list too, but not of Megatron's flags.
    is_complete = len(arguments) >= FEWEST_OF_ALL and "kv_channels" in arguments
    flags = Flags(flags_from_printed_arguments(arguments))
    return _model(arguments, flags, is_complete, _printed_vocabulary(arguments))


def _model(
    arguments: Mapping[str, str], flags: Flags, is_complete: bool, vocabulary: range | None
) -> StatedModel:
    arguments = _under_one_name(arguments)
    values: dict[str, Value] = {}
    stated = set()
    for flag in _COMPARED:
        name = _PRINTED_NAMES.get(flag.name, flag.name.removeprefix("--").replace("-", "_"))
        text = arguments.get(name)
        if not _counts(flag, arguments, flags, is_stated=text is not None):
            continue
        if text is not None:
            values[flag.name] = _parse(flag, text)
        elif flag.kind in ("on", "off"):
            values[flag.name] = False
        elif flag.name == "--num-query-groups":
            values[flag.name] = None  # As many as there are heads.
        else:
            values[flag.name] = _number(flag.default)
        if text is not None or is_complete:
            stated.add(flag.name)
    _derive(values)
    lacking = tuple(
        name for name in REQUIRED_MODEL_FLAGS if not argument_names([name]) & arguments.keys()
    )
    return StatedModel(values, frozenset(stated), lacking, vocabulary)


def _under_one_name(arguments: Mapping[str, str]) -> dict[str, str]:
    """Return the arguments with one name for flags that say the same in two ways."""
    found = dict(arguments)
    heads = found.get("num_attention_heads", "")
    if found.get("use_rotary_position_embeddings") == "True":
        found["position_embedding_type"] = "rope"
    if "layernorm_epsilon" in found:
        found.setdefault("norm_epsilon", found["layernorm_epsilon"])
    # Without grouped queries every head has keys and values of its own, whatever number is printed.
    grouped = found.get("group_query_attention")
    if grouped in _SWITCHED_OFF:
        found["num_query_groups"] = heads
    elif grouped is None and found.get("num_query_groups") in ("1", *_SWITCHED_OFF):
        del found["num_query_groups"]
    return found


def _counts(
    flag: KnownFlag, arguments: Mapping[str, str], flags: Flags, *, is_stated: bool
) -> bool:
    """Return whether the flag says something beside the others of its list."""
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


def _parse(flag: KnownFlag, text: str) -> Value:
    """Return a printed value in one form, whichever way a list or a number is written."""
    if flag.kind in ("on", "off"):
        is_true = text not in _SWITCHED_OFF
        return is_true is (flag.name not in _PRINTED_NAMES)
    plain = " ".join(re.sub(r"[][',\"()]", " ", text).split())
    return None if plain in _SWITCHED_OFF else _number(plain)


def _number(value: object) -> Value:
    """Return a number as a float, and anything else as text."""
    if value is None:
        return None
    try:
        return float(str(value))
    except ValueError:
        return str(value)


def _derive(values: dict[str, Value]) -> None:
    """Fill in what Megatron derives from other flags (`validate_args`) where a flag has no value."""
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
    if name in values and values[name] is None:
        values[name] = value


def _printed_size(sizes: range | None) -> str:
    """Return the size that a log prints: the tokenizer's, else as padded; empty if none is printed."""
    if sizes is None:
        return ""
    return str(sizes[0] if len(sizes) <= 2 else sizes[-1])


def _printed_vocabulary(arguments: Mapping[str, str]) -> range | None:
    """Return the tokenizer's size, else every size that is padded to the printed one."""
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
