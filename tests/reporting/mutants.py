"""Logs damaged as files, terminals and launchers damage them, and what the reader makes of each.

    python -m tests.reporting.mutants --seed 7 --count 200 [LOG…]

For every mutant a report is built and held against another reading of whole iteration lines by their
words alone (`figures.py`): no traceback, no figure that stands in no line, no line lost that was left
whole, nothing of a log that a page or a terminal would run. Without logs those of this folder are taken.
"""

from __future__ import annotations

import argparse
import csv
import io
import random
import re
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from parakit.logs.scrape import scrape_runs
from parakit.reporting.build import BuildOptions, build
from tests.reporting.figures import FIELDS, Figures, figures

LOGS = sorted(
    path
    for folder in ("logs", "dialects")
    for path in (Path(__file__).parent / folder).glob("*.log")
)
PAYLOAD = "<script>alert(1)</script><img src=x onerror=alert(1)>[red]x[/red]\x1b]0;title\x07`$(id)`"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")

Lines = list[bytes]


@dataclass(frozen=True)
class Mutant:
    """A damaged log."""

    content: bytes
    touched: int | None = None
    """Lines that may be lost; None where the damage is to every line."""
    says_else: bool = False
    """Its numbers are others, on purpose, so that the original's say nothing."""
    figures: bool = True
    """Whether its lines are those of iterations."""
    trains_else: bool = False
    """Its arguments are others."""


def _somewhere(lines: Lines, draw: random.Random, count: int = 5) -> list[int]:
    return sorted(draw.sample(range(len(lines)), min(count, len(lines))))


def _of_iterations(lines: Lines) -> list[int]:
    marks = (b"iteration", b":::MLLOG", b"timing_s/", b"perf/step_time", b"train_speed")
    return [index for index, line in enumerate(lines) if any(mark in line for mark in marks)]


def torn(lines: Lines, draw: random.Random) -> Mutant:
    """Lines end in their middle and go on in the next."""
    for index in _somewhere(lines, draw):
        line = lines[index]
        cut = draw.randrange(len(line) + 1)
        lines[index] = line[:cut] + b"\n" + line[cut:]
    return Mutant(b"\n".join(lines), 5)


def torn_behind_labels(lines: Lines, draw: random.Random) -> Mutant:
    """`srun -l` labels each piece of a line that it gets in two."""
    labelled = [b" 0: " + line for line in lines]
    for index in _somewhere(lines, draw):
        line = lines[index]
        cut = draw.randrange(len(line) + 1)
        labelled[index] = b" 0: " + line[:cut] + b"\n 0: " + line[cut:]
    return Mutant(b"\n".join(labelled), 5)


def interleaved(lines: Lines, draw: random.Random) -> Mutant:
    """Another rank's line runs into the middle of one."""
    for index in _somewhere(lines, draw):
        line, other = lines[index], draw.choice(lines)
        cut = draw.randrange(len(line) + 1)
        lines[index] = line[:cut] + other + b"\n" + line[cut:]
    return Mutant(b"\n".join(lines), 5)


def labelled(lines: Lines, draw: random.Random) -> Mutant:
    """Two ranks say the same, under labels, in turns."""
    label = draw.choice((b"[default%d]:", b"%d: ", b"[rank%d]: ", b"node-%d| "))
    both = [label % rank + line for line in lines for rank in (0, 1)]
    return Mutant(b"\n".join(both), 0)


def cut(lines: Lines, draw: random.Random) -> Mutant:
    """A file ends somewhere."""
    text = b"\n".join(lines)
    return Mutant(text[: draw.randrange(len(text) // 3, len(text))])


def headless(lines: Lines, draw: random.Random) -> Mutant:
    """A file begins somewhere."""
    text = b"\n".join(lines)
    return Mutant(text[draw.randrange(len(text) // 2) :])


def coloured(lines: Lines, draw: random.Random) -> Mutant:
    """A terminal's colours around words."""
    codes = (b"\x1b[31m", b"\x1b[1;32m", b"\x1b[0m", b"\x1b[K")
    return Mutant(b"\n".join(draw.choice(codes) + line + b"\x1b[0m" for line in lines), 0)


def progress(lines: Lines, draw: random.Random) -> Mutant:
    """A progress bar that is drawn over itself before lines."""
    for index in _somewhere(lines, draw, 30):
        lines[index] = (
            b"  3%|#   | 3/99 [00:01<00:32]\r 97%|####| 97/99 [02:01<00:01]\r" + lines[index]
        )
    return Mutant(b"\n".join(lines), 30)


def not_text(lines: Lines, draw: random.Random) -> Mutant:
    """Bytes that no text has."""
    for index in _somewhere(lines, draw):
        where = draw.randrange(len(lines[index]) + 1)
        junk = draw.randbytes(draw.randrange(1, 20))
        lines[index] = lines[index][:where] + junk + lines[index][where:]
    return Mutant(b"\n".join(lines), 10)


def eaten(lines: Lines, draw: random.Random) -> Mutant:
    """Bytes changed, lost and copied anywhere: any figure is possible then."""
    content = bytearray(original := b"\n".join(lines))
    for _ in range(draw.randrange(1, 40)):
        index = draw.randrange(len(content))
        match draw.randrange(3):
            case 0:
                content[index] = draw.randrange(256)
            case 1:
                del content[index : index + draw.randrange(200)]
            case _:
                content[index:index] = original[index : index + draw.randrange(400)]
    return Mutant(bytes(content), figures=False, trains_else=True)


def in_seconds(lines: Lines, draw: random.Random) -> Mutant:
    """The same numbers in another unit."""
    del draw
    text = b"\n".join(lines)
    return Mutant(text.replace(b"per iteration (ms):", b"per iteration (s):"), 0, says_else=True)


def doubled(lines: Lines, draw: random.Random) -> Mutant:
    """Every line twice, or a stretch of them."""
    if draw.random() < 0.5:
        return Mutant(b"\n".join(line for line in lines for _ in range(2)), 0)
    first = draw.randrange(len(lines))
    return Mutant(b"\n".join(lines[:first] + lines[first : first + 40] * 2 + lines[first + 40 :]))


def restarted(lines: Lines, draw: random.Random) -> Mutant:
    """The job ends, and another attempt begins with its arguments."""
    return Mutant(b"\n".join(lines[: draw.randrange(len(lines) // 2, len(lines))] + lines), 0)


def reordered(lines: Lines, draw: random.Random) -> Mutant:
    """Some iterations stand where others do."""
    places = _of_iterations(lines)
    chosen = draw.sample(places, min(6, len(places)))
    moved = [lines[index] for index in draw.sample(chosen, len(chosen))]
    for index, line in zip(chosen, moved, strict=True):
        lines[index] = line
    # MLPerf's figures come of several lines: a block's end stands behind its beginning and its batch.
    of_two = any(b":::MLLOG" in line for line in moved)
    return Mutant(b"\n".join(lines), len(chosen) if of_two else 0)


def huge(lines: Lines, draw: random.Random) -> Mutant:
    """Numbers that nothing measures."""
    return _other_numbers(
        lines, draw, (b"1e308", b"9" * 400, b"-1", b"0", b"1e-320", b"18446744073709551616")
    )


def no_numbers(lines: Lines, draw: random.Random) -> Mutant:
    """nan, inf and nothing where a number stood."""
    return _other_numbers(lines, draw, (b"nan", b"inf", b"-inf", b"NaN", b"None", b""))


def _other_numbers(lines: Lines, draw: random.Random, values: Sequence[bytes]) -> Mutant:
    number = re.compile(rb"(?<![\w.])\d[\d.]*(?:[eE][-+]?\d+)?")
    places = _of_iterations(lines) or range(len(lines))
    for index in draw.sample(places, min(8, len(places))):
        if matches := list(number.finditer(lines[index])):
            match, value = draw.choice(matches), draw.choice(values)
            lines[index] = lines[index][: match.start()] + value + lines[index][match.end() :]
    return Mutant(b"\n".join(lines), 8, says_else=True, trains_else=True)


def script(lines: Lines, draw: random.Random) -> Mutant:
    """Words that a page or a terminal would run."""
    payload = PAYLOAD.encode()
    for index in _somewhere(lines, draw, 12):
        line = lines[index]
        ends = [match.end() for match in re.finditer(rb"[ :.]", line)] or [len(line)]
        where = draw.choice((*ends, len(line)))
        lines[index] = line[:where] + payload + line[where:]
    lines.append(
        b'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\nValueError: '
        + payload
    )
    return Mutant(b"\n".join(lines), 12)


def from_windows(lines: Lines, draw: random.Random) -> Mutant:
    """CRLF, or a mark of the order of bytes."""
    if draw.random() < 0.5:
        return Mutant(b"\xef\xbb\xbf" + b"\r\n".join(lines), 0)
    return Mutant(b"\r\n".join(lines), 0)


def stamped(lines: Lines, draw: random.Random) -> Mutant:
    """A time and a level before each line."""
    before = draw.choice(
        (b"2026-01-02 03:04:05,678 - INFO - ", b"(Worker pid=7) ", b"I0102 03:04:05.6 7 x.py:8] ")
    )
    return Mutant(b"\n".join(before + line for line in lines), 0)


def without_arguments(lines: Lines, draw: random.Random) -> Mutant:
    """Some of the printed arguments are missing."""
    argument_lines = [index for index, line in enumerate(lines) if b" ....." in line]
    for index in sorted(
        draw.sample(argument_lines, min(len(argument_lines) // 4, len(argument_lines))),
        reverse=True,
    ):
        del lines[index]
    return Mutant(b"\n".join(lines), 0)


def other_arguments(lines: Lines, draw: random.Random) -> Mutant:
    """Some of the printed arguments have other values."""
    values = (b"0", b"-3", b"None", b"True", b"7", b"1e9", b"[1, 2]", b"x" * 300, PAYLOAD.encode())
    argument_lines = [index for index, line in enumerate(lines) if b" ....." in line]
    for index in draw.sample(argument_lines, len(argument_lines) // 8):
        lines[index] = lines[index].rpartition(b" ")[0] + b" " + draw.choice(values)
    return Mutant(b"\n".join(lines), 0, trains_else=True)


def unordered_arguments(lines: Lines, draw: random.Random) -> Mutant:
    """Printed arguments in any order."""
    argument_lines = [index for index, line in enumerate(lines) if b" ....." in line]
    moved = [lines[index] for index in draw.sample(argument_lines, len(argument_lines))]
    for index, line in zip(argument_lines, moved, strict=True):
        lines[index] = line
    return Mutant(b"\n".join(lines), 0)


MUTATIONS: tuple[Callable[[Lines, random.Random], Mutant], ...] = (
    *(
        torn,
        torn_behind_labels,
        interleaved,
        labelled,
        cut,
        headless,
        coloured,
        progress,
        not_text,
        eaten,
    ),
    *(in_seconds, doubled, restarted, reordered, huge, no_numbers, script, from_windows, stamped),
    *(without_arguments, other_arguments, unordered_arguments),
)


def problems(original: bytes, mutant: Mutant, folder: Path) -> Iterator[str]:
    """What is wrong with the reading or the report of a mutant."""
    try:
        (folder / "whole").mkdir()
        _, expected = _reported(original, folder / "whole")
        printed, rows = _reported(mutant.content, folder)
        runs = scrape_runs(folder / "a.log")
    except Exception:
        yield traceback.format_exc()
        return
    read: Figures = defaultdict(lambda: defaultdict(set))
    for run in runs:
        for first in run.iterations:
            for field in FIELDS:
                value = getattr(first, field)
                if value is not None and abs(value) < 1e300:
                    read[first.iteration][field].add(value)
    if mutant.figures:
        before = {} if mutant.says_else else figures(original)
        yield from _wrong_figures(read, figures(mutant.content), before)
    yield from _lost(read, figures(mutant.content), mutant)
    yield from _unsafe(folder / "reports/r", printed, rows)
    if not mutant.trains_else:
        for name in _OF_MODEL:
            known = {row[name] for row in expected} | {""}
            yield from (f"{name} is {r[name]}, not {known}" for r in rows if r[name] not in known)


_OF_MODEL = (
    *("model", "world_size", "dp", "tp", "pp", "vpp", "cp", "ep", "zero_stage", "micro_batch_size"),
    *("global_batch_size", "seq_length", "dtype", "parameters_total"),
)
"""Columns that no damage changes: they are right or empty."""


def _reported(content: bytes, folder: Path) -> tuple[str, list[dict[str, str]]]:
    """What a report of a log prints, and its rows."""
    path, output = folder / "a.log", io.StringIO()
    path.write_bytes(content)
    options = BuildOptions("r", (path,), {}, folder / "runs", folder / "reports")
    build(options, Console(file=output, width=120, highlight=False))
    with (folder / "reports/r/results.csv").open(newline="") as file:
        return output.getvalue(), list(csv.DictReader(file))


def _wrong_figures(read: Figures, whole: Figures, before: Figures) -> Iterator[str]:
    if not whole and not before:
        return
    for iteration, fields in read.items():
        for field, values in fields.items():
            known = [result[iteration][field] for result in (whole, before) if iteration in result]
            for value in values:
                if not any(abs(value - item) <= 1e-9 * abs(item) for item in set().union(*known)):
                    yield f"iteration {iteration}: {field} {value} stands in no line"


def _lost(read: Figures, whole: Figures, mutant: Mutant) -> Iterator[str]:
    if mutant.touched is None:
        return
    lost = [iteration for iteration, fields in whole.items() if fields and iteration not in read]
    if len(lost) > mutant.touched:
        yield f"{len(lost)} iterations are lost, {lost[:5]} among them"


def _unsafe(folder: Path, printed: str, rows: Iterable[dict[str, str]]) -> Iterator[str]:
    if bad := _CONTROL.search(printed.replace("\r\n", "\n")):
        yield f"the terminal gets {bad[0]!r}: {printed[max(0, bad.start() - 60) : bad.end() + 40]!r}"
    for path in folder.iterdir():
        if path.suffix not in (".html", ".md", ".svg"):
            continue
        text = path.read_text()
        for word in ("<script>alert", "<img src=x", "\x1b", "\x07"):
            if word in text:
                where = text.index(word)
                yield f"{path.name} has {text[max(0, where - 80) : where + 40]!r}"
    for row in rows:
        for name, value in row.items():
            if name not in ("notes", "run", "status") and value.lower() in ("nan", "inf", "-inf"):
                yield f"results.csv has {name} {value}"


def mutants(paths: Sequence[Path], seed: int, count: int) -> Iterator[tuple[str, bytes, Mutant]]:
    """So many, each mutation of each log in turn, with what it is called."""
    pairs = [(path, mutation) for mutation in MUTATIONS for path in paths]
    draw = random.Random(seed)
    draw.shuffle(pairs)
    for number in range(count):
        path, mutation = pairs[number % len(pairs)]
        original = path.read_bytes()
        mutant_lines = mutation(original.split(b"\n"), random.Random(f"{seed} {number}"))
        yield f"{seed}-{number} {mutation.__name__} {path.name}", original, mutant_lines


def main(arguments: Iterable[str] | None = None) -> int:
    """Print what is wrong, a mutant a paragraph; 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logs", nargs="*", type=Path, default=LOGS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--only", type=int, help="the number of one mutant")
    parser.add_argument(
        "--keep", type=Path, help="a folder for the mutants that something is wrong with"
    )
    options = parser.parse_args(arguments)
    wrong = 0
    for number, (name, original, mutant) in enumerate(
        mutants(options.logs, options.seed, options.count)
    ):
        if options.only not in (None, number):
            continue
        with tempfile.TemporaryDirectory() as folder:
            faults = list(problems(original, mutant, Path(folder)))
        if faults:
            wrong += 1
            print(f"{name}\n  " + "\n  ".join(faults[:8]), flush=True)
            if options.keep:
                (options.keep / f"{name.replace(' ', '_')}").write_bytes(mutant.content)
    print(f"{wrong} of {options.count} mutants have something wrong.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
