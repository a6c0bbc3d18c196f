"""Megatron-LM, 1 (2019) to 0.19: the line that its relatives print too, and what it says beside it.

Lines of several ranks share one stream and may be glued together, so a line is searched for,
never anchored; a field counts only if its closing bar is there: a cut number is dropped, not kept
shortened.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal

from parakit.logs.dialects import (
    Dialect,
    EventReader,
    LineField,
    LineFormat,
    Names,
    ParsedIteration,
    are_policy_metrics,
    make_iteration,
    read_every_match,
    read_first_match,
)
from parakit.logs.iterations import EXTRA_METRIC_PREFIX, Iteration, find_dtype
from parakit.logs.scraped import (
    ArgumentList,
    CheckpointEvent,
    Ending,
    Fact,
    Generation,
    MemoryReading,
    MoreArgument,
    ParameterCount,
    Remark,
    TheoreticalMemory,
    TheoreticalParameters,
    Timer,
    Validation,
)

SECONDS = Generation("Megatron", "0.7 to 0.15")
"""Time stamps in seconds; the first line comes with the log interval."""
MICROSECONDS = Generation("Megatron", "0.16 to 0.18", averages_second_line=True)
"""Time stamps in microseconds; iteration 1 is always printed, without resetting its timer."""
MICROSECONDS_GTP = Generation("Megatron", "0.19", averages_second_line=True)
"""As 0.16; parameters are listed by (tensor, gtp_weight_remat, pipeline)."""

_MARK = "iteration"
_START = re.compile(r"iteration(?:\s{1,12}|= {0,12})(\d{1,12})\s{0,4}/\s{0,12}(\d{1,12})\s{0,4}\|")
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d{1,6})?\]")
_STAMP_WITHIN = 64
"""Characters before the iteration."""
_NAMES: Names = {
    "consumed samples": ("consumed_samples", 0),
    "skipped samples": ("skipped_samples", 0),
    "elapsed time per iteration (ms)": ("elapsed_ms", 0),
    "throughput per GPU (TFLOP/s/GPU)": ("throughput_tflops_per_gpu", 0),
    "energy per GPU (J/iter/GPU)": ("energy_joules_per_gpu", 0),
    "power per GPU (W/GPU)": ("power_watts_per_gpu", 0),
    "learning rate": ("learning_rate", 0),
    "global batch size": ("global_batch_size", 0),
    "lm loss": ("lm_loss", 0),
    "loss scale": ("loss_scale", 0),
    "grad norm": ("grad_norm", 0),
    "params norm": ("params_norm", 0),
    "num zeros": ("num_zeros", 0),
    "number of skipped iterations": ("skipped_iterations", 0),
    "number of nan iterations": ("nan_iterations", 0),
}
"""A blank, `_` and `-` in a name are the same."""
_IN_PLACE_OF_LM_LOSS = "loss"
"""Some forks call it so; beside an `lm loss` it is another loss, and so it is of a policy."""
_EPOCH = re.compile(r"\bepoch:? {0,4}(\d{1,6}),? {0,4}\Z", re.IGNORECASE)
_WITHIN = 24
"""Characters before the iteration in which its epoch stands."""
_UNCLOSED = re.compile(
    r" {0,4}(?:(?:reduced_train_loss|train_step_timing in s|grad_norm): {1,8}"
    r"(?=[\d.]{5})\d{1,9}\.\d{1,9}|grad norm: {1,8}\d{1,9}\.\d{3})\s{0,8}\Z"
)
"""The last number of a line that some trainers close with no bar: NeMo writes four digits of it and
Megatron three decimals of this one; with fewer it was cut."""
_MAX_INTEGER = 10**18
_MAX_NUMBER = 1e100
_MAX_OTHER = 64
_OTHER_NAME = re.compile(r"[A-Za-z][\w .()/-]{0,60}\Z")
_NOT_LOSSES = frozenset(
    {"allocated", "max allocated", "reserved", "max reserved", "total device memory used"}
)
_JOINT = re.compile(r"[ _-]{1,80}")
# A second number is the mean so far (Primus); a unit behind the number is GPT-NeoX's.
_VALUE = re.compile(
    r"\s{0,80}([-+]?(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})(?:e[-+]?\d{1,6})?|[-+]?(?:nan|inf))"
    r"(?:/\s?[\d.]{1,40}|\s\(avg [\d.]{1,40}\)|([GTP])FLOPS)?\s{0,80}\Z",
    re.IGNORECASE,
)
_UNITS = {None: 0, "G": -3, "T": 0, "P": 3}

# Beside iterations.
NUMBER = r"([-+]?(?:\d{1,18}(?:\.\d{0,18})?(?:[eE][-+]?\d{1,3})?|nan|inf))"
MEMORY_OF_RANK = r"\[Rank (\d{1,6})\] \((?:after (\d{1,12}) iterations|[^)]{0,200})\) memory "
_MAX_MIB = 1e12
_PARAMETERS = (
    r"number of parameters on \(tensor,[^)]{0,60}pipeline\) model parallel rank "
    r"\((\d{1,6}),(?: \d{1,6},)? (\d{1,6})\): (\d{1,18})"
)
_MEMORY = (
    rf"{MEMORY_OF_RANK}\(MB\)"
    rf" \| allocated: {NUMBER} \| max allocated: {NUMBER}"
    rf" \| reserved: {NUMBER} \| max reserved: {NUMBER}"
    rf"(?: \| total device memory used: {NUMBER})?"
)
_THEORETICAL = (
    rf"Theoretical memory footprints: weight and optimizer={NUMBER} MB"
    rf"(?:, activation={NUMBER} MB, total={NUMBER} MB)?"
)
_BILLIONS = (
    r"((?:Number|Total number) of (?:active )?parameters[a-z ]{0,40}) in billions: {1,3}" + NUMBER
)
_TIMER = re.compile(
    rf"(?<![\w/-])([A-Za-z][\w/-]{{1,60}}) \.{{1,60}}: (?:\({NUMBER}, {NUMBER}\)|{NUMBER}(?![\d.,]))"
)
_OLD_TIMERS = "time (ms) |"
# Two decimals are all that was printed, so that a cut number is known by having fewer.
_OLD_TIMER = re.compile(r"([A-Za-z][\w/ -]{1,60}): (\d{1,12}\.\d\d)(?= \||\s*\Z)")
_VALIDATION = r"validation\S{0,60} loss at ((?:the end of training|iteration)[^|]{0,160})\|"
_VALIDATION_VALUE = re.compile(rf"([A-Za-z][\w ]{{0,40}}?) value: {NUMBER} \|")
_CHECKPOINT = (
    r"(saving)(?: [a-z]{1,20})? checkpoint at iteration {1,12}(\d{1,12})"
    r"|successfully (saved)(?: local)? checkpoint (?:from|at) iteration {1,12}(\d{1,12})"
    r"|successfully (loaded)(?: local)? checkpoint from [^|]{0,300}? at iteration {1,12}(\d{1,12})"
)
_EXIT = (
    r"\[(exiting program [^\]]{1,80}|after training is done)\]"
    r"|(Exiting during evaluation, timelimit)"
)
_ARGUMENT = re.compile(r"(?<!\w)([A-Za-z_]\w{0,80}) \.{1,60} ")
_OTHER_LINE = re.compile(r"(?<=\S)> (?=[a-z])")
"""Where another rank's `> setting …` ran into it: unbuffered, Python writes a line's end apart."""
_PADDED = r"> padded vocab \(size: (\d{1,9})\) with \d{1,9} dummy tokens"
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


class BarLine(LineFormat):
    """`iteration N/ M | name: value | …`, which all relatives print."""

    mark = _MARK.encode()
    opening = re.compile(r"iteration[ =]{1,12}\d{1,12} {0,4}/")
    rank = 0

    def __init__(self, names: Names) -> None:
        super().__init__(names)
        self._fields = {_key(text): known for text, known in names.items()}
        # As they are usually printed, so that most names are found without being rewritten.
        self._fields |= {f" {text}": known for text, known in names.items()}

    def find(self, line: str) -> list[ParsedIteration]:
        """Every iteration of a line, in order."""
        found: list[ParsedIteration] = []
        start = _START.search(line)
        while start is not None:
            # The quick look first: most lines hold one iteration, and a regex is slower to say so.
            more = line.find(_MARK, start.end()) >= 0
            following = _START.search(line, start.end()) if more else None
            stop = following.start() if following else len(line)
            fields = [*_numbers_of(line, start), *self._parts(line, start.end(), stop)]
            iteration = make_iteration(fields)
            if _is_whole(iteration):
                # The first `[date time]` before it, and whose it is: some count microseconds.
                before = max(0, start.start() - _STAMP_WITHIN)
                stamp = _STAMP.search(line, before, start.start())
                text = stamp[1] + (stamp[2] or "") if stamp else ""
                of = (MICROSECONDS if stamp[2] else SECONDS) if stamp else Generation()
                found.append(ParsedIteration(iteration, start.start(), fields, text, of))
            start = following
        return found

    def _parts(self, line: str, start: int, stop: int) -> list[LineField]:
        """The parts of an iteration's text that are closed by a bar."""
        end = line.find("\n", start, stop)
        stop = end if end >= 0 else stop
        parts = []
        others = 0
        last = line.rfind("|", start, stop) + 1
        if last and _UNCLOSED.match(line[last:stop]):
            line, stop = f"{line[:stop]}|", stop + 1
        while (bar := line.find("|", start, stop)) >= 0:
            colon = line.rfind(":", start, bar)
            if colon >= 0:
                part = self._part(line[start:colon], line[colon + 1 : bar], colon + 1)
                others += part.field.startswith(EXTRA_METRIC_PREFIX)
                parts.append(part if others <= _MAX_OTHER else LineField("", None, colon + 1, bar))
            start = bar + 1
        names = {part.field for part in parts}
        if "lm_loss" not in names and not are_policy_metrics(names):
            own = EXTRA_METRIC_PREFIX + _IN_PLACE_OF_LM_LOSS
            parts = [p._replace(field="lm_loss") if p.field == own else p for p in parts]
        return parts

    def _part(self, name: str, text: str, start: int) -> LineField:
        known = self._fields.get(name) or self._fields.get(_key(name))
        stop = start + len(text)
        match = _VALUE.match(text)
        if known is None:
            short = name.strip()
            plain = match and match.end(1) == len(text.rstrip()) and short not in _NOT_LOSSES
            known = (EXTRA_METRIC_PREFIX + short if plain and _OTHER_NAME.match(short) else "", 0)
        field, power = known
        if match is None or not field:
            return LineField(field, None, start, stop)
        power += _UNITS[match[2] and match[2].upper()]
        whole = find_dtype(field) is find_dtype("iteration")
        return LineField(
            field, (_integer if whole else _number)(match[1], power), start, stop, power
        )


def _key(name: str) -> str:
    return _JOINT.sub(" ", name.strip()).casefold()


def _numbers_of(line: str, start: re.Match[str]) -> tuple[LineField, LineField]:
    """The iteration, behind "iteration" or "iteration=", and of how many it is."""
    read_first_match = start.start() + len(_MARK) + (line[start.start() + len(_MARK)] == "=")
    slash = line.index("/", start.end(1))
    epoch = _EPOCH.search(line[max(0, start.start() - _WITHIN) : start.start()])
    if epoch and int(epoch[1]):
        # Counted from 0 to the last in each epoch; without a place, because digits do not show it.
        earlier = int(epoch[1]) * (int(start[2]) + 1)
        return (
            LineField("iteration", earlier + int(start[1])),
            LineField("total_iterations", None),
        )
    return (
        LineField("iteration", int(start[1]), read_first_match, start.end(1)),
        LineField("total_iterations", int(start[2]), slash + 1, start.end(2)),
    )


def _integer(text: str, power: int) -> int | None:
    try:
        number = int(text)
    except ValueError:
        return None
    return number if not power and -_MAX_INTEGER < number < _MAX_INTEGER else None


def _number(text: str, power: int) -> float | None:
    # Shifting the decimal point rounds once, multiplying would a second time.
    try:
        number = float(Decimal(text).scaleb(power)) if power else float(text)
    except ArithmeticError:
        return None
    # Nothing measures so much; "inf" and "nan" are what was printed.
    return number if abs(number) < _MAX_NUMBER or text[-1].isalpha() else None


def _is_whole(found: Iteration) -> bool:
    """Whether enough is there to be an iteration's line; NeMo's first has no time behind a bar."""
    if found.elapsed_ms is not None or found.consumed_samples is not None:
        return True
    return found.lm_loss is not None and found.global_batch_size is not None


def make_memory_reading(
    rank: str, after: str | None, sizes: Iterable[float]
) -> MemoryReading | None:
    """A rank's memory in MiB; None where a size is none. NaN and inf are what some platforms print."""
    found = MemoryReading(int(rank), int(after) if after else None, *sizes)
    largest = (found.max_allocated_mib, found.max_reserved_mib, found.device_used_mib or 0.0)
    return None if any(_MAX_MIB < size < math.inf for size in largest) else found


def add_present_names(arguments: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Arguments that also stand under the names of today; one that is printed so stays."""
    found = {new: arguments[old] for old, new in names.items() if old in arguments}
    unknown = (None, "None")
    new = {name: value for name, value in found.items() if arguments.get(name) in unknown}
    return {**arguments, **new}


def _memory(m: re.Match[str]) -> MemoryReading | None:
    return make_memory_reading(m[1], m[2], (float(size) for size in m.groups()[2:] if size))


def _theoretical_memory(m: re.Match[str]) -> Fact:
    others = (float(size) if size else None for size in m.groups()[1:])
    return TheoreticalMemory(float(m[1]), *others)


def _timer(line: str) -> Iterator[Fact]:
    if _OLD_TIMERS not in line and (found := _TIMER.search(line)):
        low, high = (found[2], found[3]) if found[2] else (found[4], found[4])
        yield Timer(found[1], 1, float(low), float(high))


def _old_timers(line: str) -> Iterator[Fact]:
    text = line[line.index(_OLD_TIMERS) + len(_OLD_TIMERS) :]
    for m in _OLD_TIMER.finditer(text):
        yield Timer(m[1], 1, float(m[2]), float(m[2]))


def _validation(head: re.Match[str]) -> Fact:
    values = _VALIDATION_VALUE.finditer(head.string[head.end() :][:_MAX_VALUE])
    number = re.search(r"iteration (\d{1,12})", head[1])
    losses = {m[1].strip(): float(m[2]) for m in values}
    return Validation(int(number[1]) if number else None, losses, head[1].strip())


def _checkpoint(m: re.Match[str]) -> Fact:
    action, iteration = filter(None, m.groups())
    return CheckpointEvent(action, int(iteration))


def _telling(line: str) -> Iterator[Fact]:
    if " iteration " not in line and _TELLING.search(line[:_MAX_VALUE]):
        yield Remark(line[:_MAX_VALUE])


def _argument(line: str) -> tuple[str, str] | None:
    m = _ARGUMENT.search(line)
    if m is None:
        return None
    value = _OTHER_LINE.split(line[m.end() : m.end() + _MAX_VALUE], 1)[0]
    return m[1], _IN_A_NOTEBOOK.sub("", value)


_ENDING = read_first_match(_EXIT, lambda m: Ending(m[1] or m[2]))

DIALECT = Dialect(
    name="Megatron-LM",
    line=BarLine,
    names=_NAMES,
    events=(
        EventReader("MB", read_every_match(_MEMORY, _memory)),
        EventReader("Theoretical memory", read_first_match(_THEORETICAL, _theoretical_memory)),
        EventReader(
            "parameters",
            read_every_match(
                _PARAMETERS, lambda m: ParameterCount(int(m[1]), int(m[2]), int(m[3]))
            ),
        ),
        EventReader("(tensor, gtp", lambda _: (MICROSECONDS_GTP,)),
        EventReader(
            "in billions",
            read_every_match(_BILLIONS, lambda m: TheoreticalParameters(m[1], float(m[2]))),
        ),
        EventReader(".:", _timer),
        EventReader(_OLD_TIMERS, _old_timers),
        EventReader("validation", read_first_match(_VALIDATION, _validation)),
        EventReader("checkpoint", read_first_match(_CHECKPOINT, _checkpoint)),
        EventReader("xiting", _ENDING),
        EventReader("after training is done", _ENDING),
        EventReader(
            "--- ", read_first_match(_HEADING, lambda _: ArgumentList(_END_OF_ARGUMENTS, _argument))
        ),
        # Of the tokenizer: arguments are printed before it is built, and may have none or another.
        EventReader(
            "padded vocab", read_first_match(_PADDED, lambda m: MoreArgument("vocab_size", m[1]))
        ),
        EventReader("", _telling),
    ),
    starts=(_HEADING, "before the start of training step"),
    arguments=lambda arguments: add_present_names(arguments, _OLD_ARGUMENTS),
)
