"""Dialect of Megatron-LM, from 1 (2019) to 0.19: its iteration line, which its relatives print too, and its events.

Ranks write into one stream, so their lines may be joined to one. An iteration is therefore searched anywhere in a
line. A number counts only if the bar after it is there: a number that was cut off is dropped.
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
"""Versions with time stamps in seconds. The first line comes after the log interval."""
MICROSECONDS = Generation("Megatron", "0.16 to 0.18", averages_second_line=True)
"""Versions with time stamps in microseconds. Iteration 1 is always printed, and its timer is not reset."""
MICROSECONDS_GTP = Generation("Megatron", "0.19", averages_second_line=True)
"""Version that lists parameters by (tensor, gtp_weight_remat, pipeline); otherwise like 0.16."""

_MARK = "iteration"
_START = re.compile(r"iteration(?:\s{1,12}|= {0,12})(\d{1,12})\s{0,4}/\s{0,12}(\d{1,12})\s{0,4}\|")
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d{1,6})?\]")
_STAMP_DISTANCE = 64
"""Most characters between a time stamp and the iteration."""
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
"""Fields by name. A blank, `_` and `-` in a name are equal."""
_IN_PLACE_OF_LM_LOSS = "loss"
"""Name of the loss in some forks. With an `lm loss`, or with metrics of a policy, it is another loss."""
_EPOCH = re.compile(r"\bepoch:? {0,4}(\d{1,6}),? {0,4}\Z", re.IGNORECASE)
_EPOCH_DISTANCE = 24
"""Most characters between an epoch and the iteration."""
_UNCLOSED = re.compile(
    r" {0,4}(?:(?:reduced_train_loss|train_step_timing in s|grad_norm): {1,8}"
    r"(?=[\d.]{5})\d{1,9}\.\d{1,9}|grad norm: {1,8}\d{1,9}\.\d{3})\s{0,8}\Z"
)
"""Last number of a line, after which some trainers write no bar.

NeMo writes at least four digits, and Megatron three decimals of its gradient norm. With fewer it was cut off."""
_MAX_INTEGER = 10**18
_MAX_NUMBER = 1e100
_MAX_OTHER = 64
_OTHER_NAME = re.compile(r"[A-Za-z][\w .()/-]{0,60}\Z")
_NOT_LOSSES = frozenset(
    {"allocated", "max allocated", "reserved", "max reserved", "total device memory used"}
)
_JOINT = re.compile(r"[ _-]{1,80}")
# Primus writes the mean so far after a number, and GPT-NeoX a unit.
_VALUE = re.compile(
    r"\s{0,80}([-+]?(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})(?:e[-+]?\d{1,6})?|[-+]?(?:nan|inf))"
    r"(?:/\s?[\d.]{1,40}|\s\(avg [\d.]{1,40}\)|([GTP])FLOPS)?\s{0,80}\Z",
    re.IGNORECASE,
)
_UNITS = {None: 0, "G": -3, "T": 0, "P": 3}

# Patterns of events.
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
# These times have two decimals. A number with fewer was cut off.
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
"""Beginning of another rank's line `> setting …` in this line.

Unbuffered, Python writes a line and its end separately."""
_PADDED = r"> padded vocab \(size: (\d{1,9})\) with \d{1,9} dummy tokens"
_HEADING = r"--- (?:(?!end of )[\w-]{1,40} ){0,3}(?i:arguments) ---"
_END_OF_ARGUMENTS = re.compile(r"--- end of (?:[\w-]{1,40} ){0,3}arguments ---", re.IGNORECASE)
"""End of a list of arguments, also of `MindSpeed-LLM Arguments`."""
_IN_A_NOTEBOOK = re.compile(r'\\n",?\s*\Z')
_MAX_VALUE = 4000
_TELLING = re.compile(
    r"\b(?:overlap\w{0,20}|cuda ?graphs?|profil(?:er|ing)|garbage|straggler\w?|throttl\w{1,6}"
    r"|(?:re)?compil(?:e|ed|ing|ation)|autotun\w{1,6}|rebalanc\w{1,6})\b",
    re.IGNORECASE,
)
_OLD_ARGUMENTS = {
    "linear_attention_type": "experimental_attention_variant",
    # Names in 2019 and 2020.
    "model_parallel_size": "tensor_model_parallel_size",
    "batch_size": "micro_batch_size",
}


class BarLine(LineFormat):
    """Format `iteration N/ M | name: value | …`, which Megatron and its relatives print."""

    mark = _MARK.encode()
    opening = re.compile(r"iteration[ =]{1,12}\d{1,12} {0,4}/")
    rank = 0

    def __init__(self, names: Names) -> None:
        super().__init__(names)
        self._fields = {_normalise_name(name): field for name, field in names.items()}
        # The usual spellings, so that most names are found without normalising them.
        self._fields |= {f" {name}": field for name, field in names.items()}

    def find(self, line: str) -> list[ParsedIteration]:
        """Return the iterations in a line, in order; empty if there are none."""
        iterations: list[ParsedIteration] = []
        start = _START.search(line)
        while start is not None:
            # Most lines hold one iteration, and a text is searched faster than a pattern.
            has_more = line.find(_MARK, start.end()) >= 0
            next_start = _START.search(line, start.end()) if has_more else None
            stop = next_start.start() if next_start else len(line)
            fields = [
                *_read_iteration_numbers(line, start),
                *self._read_parts(line, start.end(), stop),
            ]
            iteration = make_iteration(fields)
            if _is_complete(iteration):
                # Time stamps in microseconds show a newer version.
                first = max(0, start.start() - _STAMP_DISTANCE)
                stamp = _STAMP.search(line, first, start.start())
                text, generation = "", Generation()
                if stamp:
                    text = stamp[1] + (stamp[2] or "")
                    generation = MICROSECONDS if stamp[2] else SECONDS
                iterations.append(
                    ParsedIteration(iteration, start.start(), fields, text, generation)
                )
            start = next_start
        return iterations

    def _read_parts(self, line: str, start: int, stop: int) -> list[LineField]:
        """Return the numbers between `start` and `stop` of a line. Only parts that end with a bar (`|`) are read."""
        end = line.find("\n", start, stop)
        stop = end if end >= 0 else stop
        last_part = line.rfind("|", start, stop) + 1
        if last_part and _UNCLOSED.match(line[last_part:stop]):
            line, stop = f"{line[:stop]}|", stop + 1
        parts = []
        names: set[str] = set()
        num_extra = 0
        bar = line.find("|", start, stop)
        while bar >= 0:
            colon = line.rfind(":", start, bar)
            if colon < 0:  # ALCF's Megatron-DeepSpeed writes `name=value`.
                colon = line.rfind("=", start, bar)
            if colon >= 0:
                part = self._read_part(line[start:colon], line[colon + 1 : bar], colon + 1)
                # A name that is there twice is the end of another line, into which this one was written.
                is_repeated = part.field in names
                names.add("" if is_repeated else part.field)
                num_extra += not is_repeated and part.field.startswith(EXTRA_METRIC_PREFIX)
                if is_repeated or num_extra > _MAX_OTHER:
                    part = LineField("", None, colon + 1, bar)
                parts.append(part)
            start = bar + 1
            bar = line.find("|", start, stop)
        if "lm_loss" not in names and not are_policy_metrics(names):
            return _use_other_loss(parts)
        return parts

    def _read_part(self, name: str, text: str, start: int) -> LineField:
        """Return the number in one part of a line, such as `lm loss: 7.1`.

        `start` is the position of `text` in the line. The value is None if `text` is no number. The field is empty if
        the name is not known and is no metric.
        """
        known_field = self._fields.get(name) or self._fields.get(_normalise_name(name))
        stop = start + len(text)
        match = _VALUE.match(text)
        if known_field is None:
            plain_name = name.strip()
            is_plain_number = match and match.end(1) == len(text.rstrip())
            is_metric = is_plain_number and plain_name not in _NOT_LOSSES
            if is_metric and _OTHER_NAME.match(plain_name):
                known_field = (EXTRA_METRIC_PREFIX + plain_name, 0)
            else:
                known_field = ("", 0)
        field, power = known_field
        if match is None or not field:
            return LineField(field, None, start, stop)
        power += _UNITS[match[2] and match[2].upper()]
        is_integer = find_dtype(field) is find_dtype("iteration")
        value = _parse_integer(match[1], power) if is_integer else _parse_float(match[1], power)
        return LineField(field, value, start, stop, power)


def _use_other_loss(parts: list[LineField]) -> list[LineField]:
    """Return the parts of a line without `lm loss`, with the metric `loss` as the language model's loss."""
    other_name = EXTRA_METRIC_PREFIX + _IN_PLACE_OF_LM_LOSS
    return [part._replace(field="lm_loss") if part.field == other_name else part for part in parts]


def _normalise_name(name: str) -> str:
    """Return a name in lower case, with one blank for each group of blanks, `_` and `-`."""
    return _JOINT.sub(" ", name.strip()).casefold()


def _read_iteration_numbers(line: str, start: re.Match[str]) -> tuple[LineField, LineField]:
    """Return two numbers after "iteration" or "iteration=": that of the iteration, and how many are planned."""
    begin = start.start() + len(_MARK) + (line[start.start() + len(_MARK)] == "=")
    slash = line.index("/", start.end(1))
    epoch = _EPOCH.search(line[max(0, start.start() - _EPOCH_DISTANCE) : start.start()])
    if epoch and int(epoch[1]):
        # Each epoch counts from 0 to its last iteration. The field gets no position, because the digits in the
        # line are not the number of the iteration.
        earlier_iterations = int(epoch[1]) * (int(start[2]) + 1)
        return (
            LineField("iteration", earlier_iterations + int(start[1])),
            LineField("total_iterations", None),
        )
    return (
        LineField("iteration", int(start[1]), begin, start.end(1)),
        LineField("total_iterations", int(start[2]), slash + 1, start.end(2)),
    )


def _parse_integer(text: str, power: int) -> int | None:
    """Return an integer; None if the text is none, is too large, or has a unit."""
    try:
        number = int(text)
    except ValueError:
        return None
    return number if not power and -_MAX_INTEGER < number < _MAX_INTEGER else None


def _parse_float(text: str, power: int) -> float | None:
    """Return a number times 10**power, rounded once; None if it is too large for a measurement."""
    # Shifting the decimal point rounds once. A multiplication would round a second time.
    try:
        number = float(Decimal(text).scaleb(power)) if power else float(text)
    except ArithmeticError:
        return None
    # "inf" and "nan" are kept, because trainers print them.
    return number if abs(number) < _MAX_NUMBER or text[-1].isalpha() else None


def _is_complete(iteration: Iteration) -> bool:
    """Return True if a line states enough for an iteration: its time, its number of samples, or both a loss and
    a batch size.

    NeMo's first line ends without a bar (`|`) after the time.
    """
    if iteration.elapsed_ms is not None or iteration.consumed_samples is not None:
        return True
    return iteration.lm_loss is not None and iteration.global_batch_size is not None


def make_memory_reading(
    rank: str, after: str | None, sizes: Iterable[float]
) -> MemoryReading | None:
    """Return the memory of a rank, from sizes in MiB; None if a size is too large to be true.

    NaN and infinity are accepted, because some platforms print them.

    Args:
        rank: Digits of the rank.
        after: Digits of the iteration after which the memory was read; None or empty if the line states none.
        sizes: The sizes in the order of `MemoryReading`.
    """
    memory = MemoryReading(int(rank), int(after) if after else None, *sizes)
    printed_sizes = [memory.max_allocated_mib, memory.max_reserved_mib]
    if memory.device_used_mib:
        printed_sizes.append(memory.device_used_mib)
    if any(_MAX_MIB < size < math.inf for size in printed_sizes):
        return None
    return memory


def add_present_names(
    arguments: Mapping[str, str], present_names: Mapping[str, str]
) -> dict[str, str]:
    """Return the arguments, with each argument that has an old name added under its present name.

    A value that is printed under the present name is not replaced, unless it is `None`.
    """
    added = {}
    for old, new in present_names.items():
        if old in arguments and arguments.get(new) in (None, "None"):
            added[new] = arguments[old]
    return {**arguments, **added}


def _read_memory(match: re.Match[str]) -> MemoryReading | None:
    """Return the memory that a line of a rank states."""
    sizes = (float(size) for size in match.groups()[2:] if size)
    return make_memory_reading(match[1], match[2], sizes)


def _read_theoretical_memory(match: re.Match[str]) -> Fact:
    """Return Megatron's estimate of its memory."""
    activation_and_total = (float(size) if size else None for size in match.groups()[1:])
    return TheoreticalMemory(float(match[1]), *activation_and_total)


def _read_timer(line: str) -> Iterator[Fact]:
    """Yield the timer of a line, with the times of the fastest and the slowest rank."""
    match = None if _OLD_TIMERS in line else _TIMER.search(line)
    if match:
        low, high = (match[2], match[3]) if match[2] else (match[4], match[4])
        yield Timer(match[1], 1, float(low), float(high))


def _read_old_timers(line: str) -> Iterator[Fact]:
    """Yield the timers of a line of an old version, which has one time per timer."""
    text = line[line.index(_OLD_TIMERS) + len(_OLD_TIMERS) :]
    for match in _OLD_TIMER.finditer(text):
        yield Timer(match[1], 1, float(match[2]), float(match[2]))


def _read_validation(head: re.Match[str]) -> Fact:
    """Return the losses of an evaluation, which follow `head` in its line."""
    values = _VALIDATION_VALUE.finditer(head.string[head.end() :][:_MAX_VALUE])
    number = re.search(r"iteration (\d{1,12})", head[1])
    losses = {match[1].strip(): float(match[2]) for match in values}
    return Validation(int(number[1]) if number else None, losses, head[1].strip())


def _read_checkpoint(match: re.Match[str]) -> Fact:
    """Return that a checkpoint was saved or loaded."""
    action, iteration = filter(None, match.groups())
    return CheckpointEvent(action, int(iteration))


def _read_remark(line: str) -> Iterator[Fact]:
    """Yield a line between iterations that may explain why their time changes."""
    if " iteration " not in line and _TELLING.search(line[:_MAX_VALUE]):
        yield Remark(line[:_MAX_VALUE])


def _read_argument(line: str) -> tuple[str, str] | None:
    """Return name and value of an argument; None for another line."""
    match = _ARGUMENT.search(line)
    if match is None:
        return None
    value = _OTHER_LINE.split(line[match.end() : match.end() + _MAX_VALUE], 1)[0]
    return match[1], _IN_A_NOTEBOOK.sub("", value)


_ENDING = read_first_match(_EXIT, lambda m: Ending(m[1] or m[2]))

DIALECT = Dialect(
    name="Megatron-LM",
    line=BarLine,
    names=_NAMES,
    events=(
        EventReader("MB", read_every_match(_MEMORY, _read_memory)),
        EventReader("Theoretical memory", read_first_match(_THEORETICAL, _read_theoretical_memory)),
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
        EventReader(".:", _read_timer),
        EventReader(_OLD_TIMERS, _read_old_timers),
        EventReader("validation", read_first_match(_VALIDATION, _read_validation)),
        EventReader("checkpoint", read_first_match(_CHECKPOINT, _read_checkpoint)),
        EventReader("xiting", _ENDING),
        EventReader("after training is done", _ENDING),
        EventReader(
            "--- ",
            read_first_match(_HEADING, lambda _: ArgumentList(_END_OF_ARGUMENTS, _read_argument)),
        ),
        # Arguments are printed before the tokenizer is built, so they may have no vocabulary or another one.
        EventReader(
            "padded vocab", read_first_match(_PADDED, lambda m: MoreArgument("vocab_size", m[1]))
        ),
        EventReader("", _read_remark),
    ),
    starts=(_HEADING, "before the start of training step"),
    arguments=lambda arguments: add_present_names(arguments, _OLD_ARGUMENTS),
)
