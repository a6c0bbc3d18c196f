"""`make audit TABLE=figures.md`: what a table of performance figures contradicts in itself.

A check is made where a row has all figures that it needs; `audit.yaml` holds what is known by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from json import dumps
from math import inf, prod
from pathlib import Path

from examples.studies.audit_table import KNOWN, TableRow, degrees_spelled, read_table
from parakit.config.hardware import UnknownHardwareError, device_by_key

TOLERANCE = 0.03
"""Between figures that must agree, beside what rounding explains: they may be of other steps."""
_LOOSE = 0.25
"""Parameters are rounded, embeddings counted or not, formulas differ between releases."""
_MOST_OF_PEAK = 0.95
_LONG = 8192
"""Tokens of a sequence beyond which attention is too much of the work to be left out."""
_TERA = 1e12
_ACTIVE = re.compile(r"\b\d+(?:\.\d+)?b[-_]a(\d+(?:\.\d+)?)b", re.IGNORECASE)

_Checked = Iterator[tuple[bool, str, Mapping[str, object]]]
"""Whether a check holds, and the sentence of `audit.yaml` where it does not, with its parts."""


@dataclass(frozen=True)
class Contradiction:
    """One contradiction."""

    line: int
    row: str
    rule: str
    """`number`, or the name of a check (`_RULES`)."""
    sentence: str


@dataclass(frozen=True)
class Audit:
    """What was looked at, and what cannot be."""

    rows: int
    checks: int
    """Comparisons that the stated figures allowed."""
    unchecked: int
    """Rows that state too little for any."""
    contradictions: tuple[Contradiction, ...]
    skipped: Mapping[str, Mapping[str, int]]
    """Checks that were not made: for how many rows, by what these lack."""


def audit_table(table: Path, json: bool) -> int:
    """Audit a table; 1 with contradictions.

    Raises:
        TableError: It is no table.
    """
    found = audit(read_table(table))
    print(dumps(asdict(found), indent=1) if json else _text(found, table))
    return 1 if found.contradictions else 0


def _text(found: Audit, path: Path) -> str:
    lines = [
        f"{path}:{item.line}: {item.row + ': ' if item.row else ''}{item.sentence}"
        for item in found.contradictions
    ]
    bad = len({item.line for item in found.contradictions})
    outcome = f"{bad:,} of them contradict themselves" if bad else "none contradicts itself"
    few = f"; {found.unchecked:,} state too little to be checked" if found.unchecked else ""
    lines.append(f"{found.rows:,} rows, {found.checks:,} checks: {outcome}{few}.")
    skipped = (
        f"{rule} ({', '.join(f'{rows:,} without {what}' for what, rows in reasons.items())})"
        for rule, reasons in found.skipped.items()
    )
    if said := "; ".join(skipped):
        lines.append(f"Not checked, in rows: {said}.")
    return "\n".join(lines)


def audit(rows: list[TableRow]) -> Audit:
    """Check every row by every rule that its figures allow."""
    made, unchecked, contradictions = 0, 0, []
    skipped: dict[str, dict[str, int]] = {}
    for row in rows:
        wrong = dict(_impossible(row))
        numbers = {name: n for name, n in row.numbers.items() if n and name not in wrong}
        broken, checks = [("number", sentence) for sentence in wrong.values()], len(wrong)
        for rule, check in _RULES.items():
            found = list(check(replace(row, numbers=numbers)))
            checks += len(found)
            broken += [
                (rule, KNOWN["sentences"][name].format(**{**numbers, **parts}))
                for holds, name, parts in found
                if not holds
            ]
            if lacks := None if found else _lacking(rule, row, numbers):
                reasons = skipped.setdefault(rule, {})
                reasons[lacks] = reasons.get(lacks, 0) + 1
        made += checks
        unchecked += not checks
        contradictions += [Contradiction(row.line, row.name, *each) for each in broken]
    return Audit(len(rows), made, unchecked, tuple(contradictions), skipped)


def _lacking(rule: str, row: TableRow, numbers: Mapping[str, float]) -> str:
    """What a check could not be made without; empty for one that every row may do without."""
    for group in KNOWN["needs"].get(rule, ()):
        if not any(name in numbers or (name == "gpu" and row.words.get(name)) for name in group):
            return " or ".join(KNOWN["said"].get(name, name) for name in group)
    return "figures that decide it" if rule in KNOWN["needs"] else ""


def _impossible(row: TableRow) -> Iterator[tuple[str, str]]:
    """Quantities that no run can have; a 0 of those that it can do without says that it has none."""
    for name, value in row.numbers.items():
        whole = "whole " if name in KNOWN["whole"] else ""
        possible = 0 < value < inf and not (whole and value % 1)
        if not possible and name != "difference" and (value or name not in KNOWN["may_be_none"]):
            said = KNOWN["said"].get(name, name)
            yield name, f"{said} is {value:g}, no {whole}number above 0."


def _degrees(row: TableRow) -> _Checked:
    n = row.numbers
    known = {name: int(n[name]) for name in ("tp", "pp", "cp", "dp") if name in n}
    if "gpus" not in n or not {"tp", "pp"} & known.keys() or _unclear(row):
        return
    product, gpus = prod(known.values()), n["gpus"]
    words = " x ".join(f"{name.upper()} {degree}" for name, degree in known.items())
    parts = {"words": words, "product": product}
    if "dp" in known:
        # DP may count replicas of the experts, not of what is beside them.
        experts = n["dp"] * n.get("pp", 1) * n.get("ep", 0) * n.get("etp", 1)
        yield gpus in (product, experts), "degrees", parts
    else:
        yield gpus % product == 0, "degrees divide", parts


def _unclear(row: TableRow) -> bool:
    """Whether a degree is more than one number."""
    return not row.words.keys().isdisjoint(("tp", "pp", "cp", "dp"))


def _divisibility(row: TableRow) -> _Checked:
    n = row.numbers
    pipeline, data = n.get("pp", 1), n.get("dp")
    if data is None and {"gpus", "tp", "pp"} <= n.keys() and not _unclear(row):
        data = n["gpus"] / (n["tp"] * pipeline * n.get("cp", 1))
        data = data if data.is_integer() else None

    def divides(
        whole: float, part: float, what: str, by: str
    ) -> tuple[bool, str, dict[str, object]]:
        return whole % part == 0, "multiple", {"whole": whole, "what": what, "by": by}

    for what, said in (("heads", "attention heads"), ("hidden", "hidden")):
        if {what, "tp"} <= n.keys():
            yield divides(n[what], n["tp"], said, f"TP {n['tp']:g}")
    if {"layers", "pp"} <= n.keys():
        stages = pipeline * n.get("vpp", 1)
        yield n["layers"] + 2 >= stages, "layers", {"stages": stages}
    if {"experts", "ep"} <= n.keys():
        yield divides(n["experts"], n["ep"], "experts", f"EP {n['ep']:g}")
    if {"gbs", "mbs"} <= n.keys() and data:
        by = f"micro batch {n['mbs']:g} x DP {data:g}"
        yield divides(n["gbs"], n["mbs"] * data, "samples", by)
    if {"ep", "gpus", "pp"} <= n.keys():
        yield divides(n["gpus"] / pipeline, n["ep"], "ranks of a stage", f"EP {n['ep']:g}")


def _name(row: TableRow) -> _Checked:
    """Degrees that a case's own name spells."""
    for name, degree in degrees_spelled(row.name).items():
        if name in row.numbers and name not in ("dp", "etp"):
            stated = row.numbers[name]
            yield stated == degree, "name", {"name": name.upper(), "own": degree, "stated": stated}


def _tokens(row: TableRow) -> _Checked:
    n = row.numbers
    both = n["tokens_s_gpu"] * n["gpus"] if {"tokens_s_gpu", "gpus"} <= n.keys() else None
    rate = n.get("tokens_s", both)
    if rate and {"gbs", "seq", "step_s"} <= n.keys():
        implied = n["gbs"] * n["seq"] / n["step_s"]
        holds = _agree(row, rate, implied, "step_s", "tokens_s", "tokens_s_gpu")
        batch = rate * n["step_s"] / n["seq"]
        parts = {"implied": implied, "rate": rate, "ratio": rate / implied, "batch": batch}
        yield holds, "tokens", parts
        if holds:
            return
    if both and "tokens_s" in n:
        holds = _agree(row, n["tokens_s"], both, "tokens_s", "tokens_s_gpu")
        yield holds, "tokens of all", {"both": both}


def _samples(row: TableRow) -> _Checked:
    """Samples a second against batch and step time; without a batch against the baseline's."""
    n, base = row.numbers, row.baseline.numbers if row.baseline else {}
    if not {"samples_s", "step_s"} <= n.keys():
        return
    implied = n["samples_s"] * n["step_s"]
    if "gbs" in n:
        theirs, other = n["gbs"], f"not {n['gbs']:g}"
    elif {"samples_s", "step_s"} <= base.keys():
        theirs = base["samples_s"] * base["step_s"]
        other = f"and the baseline's {theirs:.3g}"
    else:
        return
    holds = _agree(row, theirs, implied, "samples_s", "step_s")
    yield holds, "samples", {"implied": implied, "other": other}


def _speedup(row: TableRow) -> _Checked:
    """A speedup against the baseline's times or rates."""
    n, base = row.numbers, row.baseline.numbers if row.baseline else {}
    if "speedup" not in n or row.baseline is None:
        return
    for name in ("samples_s", "tokens_s", "step_s"):
        if name in n and name in base:
            ratio = base[name] / n[name] if name == "step_s" else n[name] / base[name]
            holds = _agree(row, n["speedup"], ratio, "speedup", name)
            yield holds, "speedup", {"what": KNOWN["said"][name], "ratio": ratio}


def _difference(row: TableRow) -> _Checked:
    """The distance of two figures: absolute, or as a share of either."""
    n = row.numbers
    if not {"one", "other", "difference"} <= n.keys():
        return
    stated, apart = abs(n["difference"]), abs(n["one"] - n["other"])
    shares = (
        (100 * apart / n["one"], 100 * apart / n["other"]) if "%" in row.words["difference"] else ()
    )
    half = stated * row.slack["difference"]
    # What rounding of the two figures leaves open.
    open_ = n["one"] * row.slack["one"] + n["other"] * row.slack["other"]
    open_ *= 100 / n["other"] if shares else 1
    holds = any(abs(stated - each) <= half + open_ for each in (apart, *shares))
    yield holds, "difference", {"apart": apart, "printed": row.words["difference"]}


def _flops(row: TableRow) -> _Checked:
    """TFLOP/s against 6 FLOPs a parameter and token, and attention's; a mixture's active ones."""
    n, rate, active = row.numbers, _rate_of_gpu(row), _active_parameters(row)
    stated = n.get("tflops", n.get("hardware_tflops"))
    attention = 12 * n.get("layers", 0) * n.get("hidden", 0) * n.get("seq", 0)
    left_out = not attention and n.get("seq", 0) > _LONG
    if stated is None or rate is None or active is None or left_out:
        return
    least, most = 6 * active * rate / _TERA, (6 * active + attention) * rate / _TERA
    most *= 4 / 3  # With the forward pass that full recomputation repeats.
    holds = least * (1 - _LOOSE) <= stated <= most * (1 + _LOOSE)
    parts = {"rate": rate, "billions": active / 1e9, "least": least, "most": most}
    yield holds, "flops", {"stated": stated, **parts}


def _mfu(row: TableRow) -> _Checked:
    n, peak = row.numbers, _peak(row)
    for name in ("mfu", "hfu"):
        if share := n.get(name):
            yield share <= 100, "share", {"name": name.upper(), "share": share}
    if peak is None:
        return
    gpu, dtype = row.words.get("gpu"), row.words.get("dtype", "")
    stated, rate, active = n.get("tflops"), _rate_of_gpu(row), _active_parameters(row)
    if stated is not None:
        yield stated <= peak, "peak", {"peak": peak, "gpu": gpu}
        if "mfu" in n and ("16" in dtype or not dtype):
            # Without a precision any peak may be meant; 16 bits where none fits.
            peaks = [peak] if dtype else _peaks(row).values()
            half = _peaks(row).get("bf16") or _peaks(row).get("fp16") or peak
            in_16 = "" if dtype else " in 16 bits"
            holds = any(_agree(row, n["mfu"], 100 * stated / e, "mfu", "tflops") for e in peaks)
            yield holds, "mfu", {"own": stated / half, "half": half, "gpu": gpu, "in_16": in_16}
    if rate and active:
        least = 6 * active * rate / _TERA
        parts = {"rate": rate, "billions": active / 1e9, "least": least, "gpu": gpu}
        yield least <= _MOST_OF_PEAK * peak, "beyond", {**parts, "own": least / peak}


def _rate_of_gpu(row: TableRow) -> float | None:
    n = row.numbers
    if "tokens_s_gpu" in n or "gpus" not in n:
        return n.get("tokens_s_gpu")
    implied = n["gbs"] * n["seq"] / n["step_s"] if {"gbs", "seq", "step_s"} <= n.keys() else None
    rate = n.get("tokens_s", implied)
    return rate and rate / n["gpus"]


def _active_parameters(row: TableRow) -> float | None:
    """Of a dense model all; of a mixture those that its name states."""
    if match := _ACTIVE.search(row.name):
        return float(match[1]) * 1e9
    n = row.numbers
    mixture = n.get("ep", 1) > 1 or n.get("experts", 0) > 1 or "experts" in row.words
    said = f"{row.name} {row.words.get('notes', '')}".lower()
    if mixture or any(word in said for word in KNOWN["sparse"]):
        return None
    of_shape = 12 * n["layers"] * n["hidden"] ** 2 if {"layers", "hidden"} <= n.keys() else None
    stated = n["params_b"] * 1e9 if "params_b" in n else None
    if stated and of_shape and not 0.5 < of_shape / stated < 2:
        return None  # A part of the model was run, or another one is named.
    return stated or of_shape


def _peak(row: TableRow) -> float | None:
    """Dense peak in TFLOP/s of the stated precision, of the fastest one where none is stated."""
    peaks = _peaks(row)
    if not peaks:
        return None
    dtype = row.words.get("dtype", "").lower()
    if "16" in dtype and "8" not in dtype:
        return peaks.get("bf16") or peaks.get("fp16")
    fastest = max(peaks.values())
    return 2 * fastest if "fp4" in dtype else fastest


def _peaks(row: TableRow) -> Mapping[str, float]:
    """Of the device that a row names, by precision; none of one that is not known."""
    try:
        return device_by_key(row.words.get("gpu", "").lower()).peak_tflops
    except UnknownHardwareError:
        return {}


def _agree(row: TableRow, one: float, two: float, *printed: str) -> bool:
    """Within the tolerance, and what the digits of the printed ones leave open."""
    tolerance = TOLERANCE + sum(row.slack.get(name, 0.0) for name in printed)
    return two > 0 and abs(one / two - 1) <= tolerance


_RULES: dict[str, Callable[[TableRow], _Checked]] = {
    "degrees": _degrees,
    "divisibility": _divisibility,
    "name": _name,
    "samples": _samples,
    "speedup": _speedup,
    "difference": _difference,
    "tokens": _tokens,
    "flops": _flops,
    "mfu": _mfu,
}
