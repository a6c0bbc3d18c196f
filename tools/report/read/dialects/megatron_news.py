"""Megatron-LM, 1 (2019) to 0.19: what it says beside its iteration line, which is in `megatron.py`.

Lines of several ranks may be glued together, so all are searched for, never anchored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from tools.report.read.dialects import Dialect, News
from tools.report.read.dialects.megatron import MICROSECONDS_GTP
from tools.report.read.scraped import (
    ArgumentList,
    CheckpointEvent,
    Ending,
    Fact,
    MemoryReading,
    MoreArgument,
    ParameterCount,
    Remark,
    TheoreticalMemory,
    TheoreticalParameters,
    Timer,
    Validation,
)

NUMBER = r"([-+]?(?:\d{1,18}(?:\.\d{0,18})?(?:[eE][-+]?\d{1,3})?|nan|inf))"
MEMORY_OF_RANK = r"\[Rank (\d{1,6})\] \((?:after (\d{1,12}) iterations|[^)]{0,200})\) memory "
_MAX_MIB = 1e12
_PARAMETERS = re.compile(
    r"number of parameters on \(tensor,[^)]{0,60}pipeline\) model parallel rank "
    r"\((\d{1,6}),(?: \d{1,6},)? (\d{1,6})\): (\d{1,18})"
)
_MEMORY = re.compile(
    rf"{MEMORY_OF_RANK}\(MB\)"
    rf" \| allocated: {NUMBER} \| max allocated: {NUMBER}"
    rf" \| reserved: {NUMBER} \| max reserved: {NUMBER}"
    rf"(?: \| total device memory used: {NUMBER})?"
)
_THEORETICAL = re.compile(
    rf"Theoretical memory footprints: weight and optimizer={NUMBER} MB"
    rf"(?:, activation={NUMBER} MB, total={NUMBER} MB)?"
)
_BILLIONS = re.compile(
    rf"((?:Number|Total number) of (?:active )?parameters[a-z ]{{0,40}}) in billions: {{1,3}}{NUMBER}"
)
_TIMER = re.compile(
    rf"(?<![\w/-])([A-Za-z][\w/-]{{1,60}}) \.{{1,60}}: (?:\({NUMBER}, {NUMBER}\)|{NUMBER}(?![\d.,]))"
)
_OLD_TIMERS = "time (ms) |"
# Two decimals are all that was printed, so that a cut number is known by having fewer.
_OLD_TIMER = re.compile(r"([A-Za-z][\w/ -]{1,60}): (\d{1,12}\.\d\d)(?= \||\s*\Z)")
_VALIDATION = re.compile(
    r"validation\S{0,60} loss at ((?:the end of training|iteration)[^|]{0,160})\|"
)
_VALIDATION_VALUE = re.compile(rf"([A-Za-z][\w ]{{0,40}}?) value: {NUMBER} \|")
_CHECKPOINT = re.compile(
    r"(saving)(?: [a-z]{1,20})? checkpoint at iteration {1,12}(\d{1,12})"
    r"|successfully (saved)(?: local)? checkpoint (?:from|at) iteration {1,12}(\d{1,12})"
    r"|successfully (loaded)(?: local)? checkpoint from [^|]{0,300}? at iteration {1,12}(\d{1,12})"
)
_EXIT = re.compile(
    r"\[(exiting program [^\]]{1,80}|after training is done)\]"
    r"|(Exiting during evaluation, timelimit)"
)
_ARGUMENT = re.compile(r"(?<!\w)([A-Za-z_]\w{0,80}) \.{1,60} ")
_OTHER_LINE = re.compile(r"(?<=\S)> (?=[a-z])")
"""Where another rank's `> setting …` ran into it: unbuffered, Python writes a line's end apart."""
_PADDED = re.compile(r"> padded vocab \(size: (\d{1,9})\) with \d{1,9} dummy tokens")
_HEADING = r"--- (?:(?!end of )[\w-]{1,40} ){0,3}(?i:arguments) ---"
_END_OF_ARGUMENTS = re.compile(r"--- end of (?:[\w-]{1,40} ){0,3}arguments ---", re.IGNORECASE)
"""MindSpeed-LLM's are `MindSpeed-LLM Arguments`."""
_IN_A_NOTEBOOK = re.compile(r'\\n",?\s*\Z')
_MAX_VALUE = 4000
_TELLING = re.compile(
    r"\b(?:overlap\w{0,20}|cuda ?graphs?|profil(?:er|ing)|garbage|straggler\w?|throttl\w{1,6}"
    r"|(?:re)?compil(?:e|ed|ing|ation)|autotun\w{1,6}|rebalanc\w{1,6})\b",
    re.IGNORECASE,
)
_OLD_ARGUMENTS = {
    "linear_attention_type": "experimental_attention_variant",
    # Of 2019 and 2020.
    "model_parallel_size": "tensor_model_parallel_size",
    "batch_size": "micro_batch_size",
}


def is_possible(reading: MemoryReading) -> bool:
    """Whether its sizes are sizes; NaN and inf are what some platforms print."""
    sizes = (reading.max_allocated_mib, reading.max_reserved_mib, reading.device_used_mib or 0.0)
    return not any(_MAX_MIB < size < math.inf for size in sizes)


def renamed(arguments: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Arguments that also stand under the names of today; one that is printed so stays."""
    found = {new: arguments[old] for old, new in names.items() if old in arguments}
    unknown = (None, "None")
    new = {name: value for name, value in found.items() if arguments.get(name) in unknown}
    return {**arguments, **new}


def _parameters(line: str) -> Iterator[Fact]:
    for m in _PARAMETERS.finditer(line):
        yield ParameterCount(int(m[1]), int(m[2]), int(m[3]))
    if "(tensor, gtp" in line:
        yield MICROSECONDS_GTP


def _memory(line: str) -> Iterator[Fact]:
    for m in _MEMORY.finditer(line):
        sizes = [float(size) for size in m.groups()[2:] if size]
        found = MemoryReading(int(m[1]), int(m[2]) if m[2] else None, *sizes)
        if is_possible(found):
            yield found


def _theoretical_memory(line: str) -> Iterator[Fact]:
    if m := _THEORETICAL.search(line):
        yield TheoreticalMemory(
            float(m[1]), *(float(size) if size else None for size in m.groups()[1:])
        )


def _theoretical_parameters(line: str) -> Iterator[Fact]:
    for m in _BILLIONS.finditer(line):
        yield TheoreticalParameters(m[1], float(m[2]))


def _timer(line: str) -> Iterator[Fact]:
    if _OLD_TIMERS not in line and (found := _TIMER.search(line)):
        low, high = (found[2], found[3]) if found[2] else (found[4], found[4])
        yield Timer(found[1], 1, float(low), float(high))


def _old_timers(line: str) -> Iterator[Fact]:
    text = line[line.index(_OLD_TIMERS) + len(_OLD_TIMERS) :]
    for m in _OLD_TIMER.finditer(text):
        yield Timer(m[1], 1, float(m[2]), float(m[2]))


def _validation(line: str) -> Iterator[Fact]:
    if head := _VALIDATION.search(line):
        values = _VALIDATION_VALUE.finditer(line[head.end() :][:_MAX_VALUE])
        number = re.search(r"iteration (\d{1,12})", head[1])
        losses = {m[1].strip(): float(m[2]) for m in values}
        yield Validation(int(number[1]) if number else None, losses, head[1].strip())


def _checkpoint(line: str) -> Iterator[Fact]:
    if m := _CHECKPOINT.search(line):
        action, iteration = (text for text in m.groups() if text)
        yield CheckpointEvent(action, int(iteration))


def _ending(line: str) -> Iterator[Fact]:
    if m := _EXIT.search(line):
        yield Ending(m[1] or m[2])


def _telling(line: str) -> Iterator[Fact]:
    if " iteration " not in line and _TELLING.search(line[:_MAX_VALUE]):
        yield Remark(line[:_MAX_VALUE])


def _argument(line: str) -> tuple[str, str] | None:
    m = _ARGUMENT.search(line)
    if m is None:
        return None
    value = _OTHER_LINE.split(line[m.end() : m.end() + _MAX_VALUE], 1)[0]
    return m[1], _IN_A_NOTEBOOK.sub("", value)


def _vocabulary(line: str) -> Iterator[Fact]:
    """Of the tokenizer: arguments are printed before it is built, and may have none or another."""
    if m := _PADDED.search(line):
        yield MoreArgument("vocab_size", m[1])


def _arguments(line: str) -> Iterator[Fact]:
    if re.search(_HEADING, line):
        yield ArgumentList(_END_OF_ARGUMENTS, _argument)


DIALECT = Dialect(
    name="Megatron-LM, other lines",
    news=(
        News("MB", _memory),
        News("Theoretical memory", _theoretical_memory),
        News("parameters", _parameters),
        News("in billions", _theoretical_parameters),
        News(".:", _timer),
        News(_OLD_TIMERS, _old_timers),
        News("validation", _validation),
        News("checkpoint", _checkpoint),
        News("xiting", _ending),
        News("after training is done", _ending),
        News("--- ", _arguments),
        News("padded vocab", _vocabulary),
        News("", _telling),
    ),
    starts=(_HEADING, "before the start of training step"),
    arguments=lambda arguments: renamed(arguments, _OLD_ARGUMENTS),
)
