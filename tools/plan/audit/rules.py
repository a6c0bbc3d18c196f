"""What a row of figures contradicts in itself: degrees, divisibility, tokens, FLOPs, utilisation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

from tools.plan.audit.table import DEGREES, TableRow, degrees_spelled
from tools.spec.hardware import UnknownHardwareError, device_by_key

TOLERANCE = 0.03
"""Between figures that must agree, beside what rounding explains: they may be of other steps."""
_MOST_OF_PEAK = 0.95
_TERA = 1e12


@dataclass(frozen=True)
class Contradiction:
    """One contradiction."""

    line: int
    row: str
    rule: str
    """`number`, `degrees`, `divisibility`, `name`, `tokens`, `flops` or `mfu`."""
    sentence: str


@dataclass(frozen=True)
class Audit:
    """What was looked at, and what cannot be."""

    rows: int
    checks: int
    """Comparisons that the stated figures allowed."""
    unchecked: int
    """Rows that state too little for any."""
    findings: tuple[Contradiction, ...]


def audit(rows: list[TableRow]) -> Audit:
    """Check every row by every rule that its figures allow."""
    made, unchecked, findings = 0, 0, []
    for row in rows:
        wrong = dict(_impossible(row))
        numbers = {name: n for name, n in row.numbers.items() if n and name not in wrong}
        possible = replace(row, numbers=numbers)
        results = [(rule, list(check(possible))) for rule, check in _RULES]
        checks = [("number", text) for text in wrong.values()]
        checks += [(rule, text) for rule, found in results for text in found]
        made += len(checks)
        unchecked += not checks
        findings += [Contradiction(row.line, row.name, rule, text) for rule, text in checks if text]
    return Audit(len(rows), made, unchecked, tuple(findings))


def _impossible(row: TableRow) -> Iterator[tuple[str, str]]:
    """Quantities that no run can have; a 0 of those that it can do without says that it has none."""
    for name, value in row.numbers.items():
        whole = "whole " if name in _WHOLE else ""
        possible = 0 < value < inf and not (whole and value % 1)
        if not possible and (value or name not in _MAY_BE_NONE):
            yield name, f"{_SAID.get(name, name)} is {value:g}, no {whole}number above 0."


_WHOLE = (*DEGREES, "gpus", "layers", "heads")
_MAY_BE_NONE = ("vpp", "ep", "etp", "cp", "experts", "ffn")
_SAID = {
    **{name: name.upper() for name in (*DEGREES, "gpus", "gbs", "mbs", "mfu", "hfu")},
    **{"step_s": "step time", "tokens_s": "tokens/s", "tokens_s_gpu": "tokens/s/GPU"},
}


def _degrees(row: TableRow) -> Iterator[str]:
    """An empty text is a check that held."""
    known = {
        name: int(row.numbers[name]) for name in ("tp", "pp", "cp", "dp") if name in row.numbers
    }
    gpus = row.numbers.get("gpus")
    if gpus is None or not {"tp", "pp"} & known.keys() or _unclear(row):
        return
    product = 1
    for degree in known.values():
        product *= degree
    words = " x ".join(f"{name.upper()} {degree}" for name, degree in known.items())
    if "dp" in known:
        held = gpus in (product, _over_experts(row.numbers))
        yield "" if held else f"{words} = {product:,}, not the {gpus:,.0f} GPUs stated."
    else:
        whole = product > 0 and gpus % product == 0
        yield "" if whole else f"{words} = {product:,} does not divide the {gpus:,.0f} GPUs stated."


def _divisibility(row: TableRow) -> Iterator[str]:
    n = row.numbers
    tensor, pipeline = n.get("tp", 1), n.get("pp", 1)
    for what, number in (("heads", "attention heads"), ("hidden", "hidden")):
        if what in n and "tp" in n:
            yield _divides(n[what], tensor, number, f"TP {tensor:g}")
    if "layers" in n and "pp" in n:
        stages = pipeline * (n.get("vpp") or 1)
        short = n["layers"] + 2 < stages
        yield f"{n['layers']:g} layers do not fill {stages:g} stages (PP x VPP)." if short else ""
    if "experts" in n and "ep" in n:
        yield _divides(n["experts"], n["ep"], "experts", f"EP {n['ep']:g}")
    data = n.get("dp") or _data(row)
    if {"gbs", "mbs"} <= n.keys() and data:
        step = n["mbs"] * data
        yield _divides(n["gbs"], step, "samples", f"micro batch {n['mbs']:g} x DP {data:g}")
    if "ep" in n and "gpus" in n and "pp" in n:
        ranks = n["gpus"] / pipeline
        yield _divides(ranks, n["ep"], "ranks of a stage", f"EP {n['ep']:g}")


def _over_experts(n: Mapping[str, float]) -> float | None:
    """GPUs where DP counts replicas of the experts, not of what is beside them."""
    return n["dp"] * n.get("pp", 1) * n["ep"] * n.get("etp", 1) if "ep" in n else None


def _unclear(row: TableRow) -> bool:
    """Whether a degree is more than one number."""
    return not row.words.keys().isdisjoint(("tp", "pp", "cp", "dp"))


def _data(row: TableRow) -> float | None:
    n = row.numbers
    if not {"gpus", "tp", "pp"} <= n.keys() or _unclear(row):
        return None
    data = n["gpus"] / (n["tp"] * n["pp"] * n.get("cp", 1))
    return data if data.is_integer() else None


def _divides(whole: float, part: float, what: str, by: str) -> str:
    return "" if part and whole % part == 0 else f"{whole:,g} {what} are no multiple of {by}."


def _name(row: TableRow) -> Iterator[str]:
    """Degrees that a case's own name spells."""
    for name, degree in degrees_spelled(row.name).items():
        if name in row.numbers and name not in ("dp", "etp"):
            stated = row.numbers[name]
            differs = f"Its name says {name.upper()} {degree:g}, its column {stated:g}."
            yield "" if stated == degree else differs


def _tokens(row: TableRow) -> Iterator[str]:
    n = row.numbers
    rate = tokens_per_second(row)
    if rate and {"gbs", "seq", "step_s"} <= n.keys():
        implied = n["gbs"] * n["seq"] / n["step_s"]
        if _agree(rate, implied, _slack(row, "step_s", "tokens_s", "tokens_s_gpu")):
            yield ""
            return
        batch = rate * n["step_s"] / n["seq"]
        yield (
            f"A global batch of {n['gbs']:,g} x {n['seq']:,g} tokens in {n['step_s']:g} s is "
            f"{implied:,.0f} tokens/s, not {rate:,.0f} (x{rate / implied:.2f}); that rate is a global "
            f"batch of {batch:,.0f}."
        )
    if {"tokens_s", "tokens_s_gpu", "gpus"} <= n.keys():
        both = n["tokens_s_gpu"] * n["gpus"]
        held = _agree(n["tokens_s"], both, _slack(row, "tokens_s", "tokens_s_gpu"))
        yield (
            ""
            if held
            else f"{n['tokens_s_gpu']:,g} tokens/s a GPU on {n['gpus']:g} are {both:,.0f}, not "
            f"{n['tokens_s']:,g}."
        )


def tokens_per_second(row: TableRow) -> float | None:
    """As the table states it, over all GPUs."""
    n = row.numbers
    if "tokens_s" in n:
        return n["tokens_s"]
    return n["tokens_s_gpu"] * n["gpus"] if {"tokens_s_gpu", "gpus"} <= n.keys() else None


def _flops(row: TableRow) -> Iterator[str]:
    """TFLOP/s against 6 FLOPs a parameter and token, and attention's; a mixture's active ones."""
    n, rate, active = row.numbers, _rate_of_gpu(row), _active_parameters(row)
    stated = n.get("tflops", n.get("hardware_tflops"))
    if stated is None or rate is None or active is None:
        return
    attention = 12 * n.get("layers", 0) * n.get("hidden", 0) * n.get("seq", 0)
    if not attention and n.get("seq", 0) > 8192:
        return  # Attention is too much of the work to be left out.
    least, most = 6 * active * rate / _TERA, (6 * active + attention) * rate / _TERA
    most *= 4 / 3  # With the forward pass that full recomputation repeats.
    if least * (1 - _LOOSE) <= stated <= most * (1 + _LOOSE):
        yield ""
        return
    yield (
        f"{stated:g} TFLOP/s a GPU, but {rate:,.0f} tokens/s of {active / 1e9:.3g} billion parameters "
        f"are {least:.0f} to {most:.0f}."
    )


_LOOSE = 0.25
"""Parameters are rounded, embeddings counted or not, formulas differ between releases."""


def _mfu(row: TableRow) -> Iterator[str]:
    n, peak = row.numbers, _peak(row)
    for name in ("mfu", "hfu"):
        if share := n.get(name):
            said = f"An {name.upper()} of {share:g}% is none; it lies between 0 and 100."
            yield said if share > 100 else ""
    if peak is None:
        return
    stated, rate, active = n.get("tflops"), _rate_of_gpu(row), _active_parameters(row)
    if stated is not None:
        over = stated > peak
        yield f"{stated:g} TFLOP/s are above the {peak:g} of a {row.words['gpu']}." if over else ""
        if "mfu" in n and "16" in row.words.get("dtype", ""):
            held = _agree(n["mfu"], 100 * stated / peak, _slack(row, "mfu", "tflops"))
            yield (
                ""
                if held
                else f"{stated:g} TFLOP/s are {stated / peak:.1%} of the {peak:g} of a "
                f"{row.words['gpu']}, not an MFU of {n['mfu']:g}%."
            )
    if rate and active:
        least = 6 * active * rate / _TERA
        over = least > _MOST_OF_PEAK * peak
        yield (
            f"{rate:,.0f} tokens/s a GPU of {active / 1e9:.3g} billion parameters take {least:.0f} "
            f"TFLOP/s, {least / peak:.0%} of the peak of a {row.words['gpu']}."
            if over
            else ""
        )


def _rate_of_gpu(row: TableRow) -> float | None:
    n = row.numbers
    if "tokens_s_gpu" in n:
        return n["tokens_s_gpu"]
    if "gpus" not in n:
        return None
    if "tokens_s" in n:
        return n["tokens_s"] / n["gpus"]
    if {"gbs", "seq", "step_s"} <= n.keys() and n["step_s"]:
        return n["gbs"] * n["seq"] / n["step_s"] / n["gpus"]
    return None


_ACTIVE = re.compile(r"\b\d+(?:\.\d+)?b[-_]a(\d+(?:\.\d+)?)b", re.IGNORECASE)
_MIXTURES = (
    "moe",
    "mixtral",
    "deepseek",
    "grok",
    "expert",
    "gpt-oss",
    "kimi",
    "dbrx",
    "qwen3-next",
)


def _active_parameters(row: TableRow) -> float | None:
    """Of a dense model all; of a mixture those that its name states."""
    if match := _ACTIVE.search(row.name):
        return float(match[1]) * 1e9
    n = row.numbers
    mixture = n.get("ep", 1) > 1 or n.get("experts", 0) > 1 or "experts" in row.words
    said = f"{row.name} {row.words.get('notes', '')}".lower()
    if mixture or any(word in said for word in _MIXTURES) or _adapts(said):
        return None
    from_shape = _dense_parameters(row)
    stated = n["params_b"] * 1e9 if "params_b" in n else None
    if stated and from_shape and not 0.5 < from_shape / stated < 2:
        return None  # A part of the model was run, or another one is named.
    return stated or from_shape


def _adapts(said: str) -> bool:
    return any(word in said for word in ("lora", "peft", "sft", "finetun", "fine-tun"))


def _dense_parameters(row: TableRow) -> float | None:
    n = row.numbers
    if not {"layers", "hidden"} <= n.keys():
        return None
    return 12 * n["layers"] * n["hidden"] ** 2


def _peak(row: TableRow) -> float | None:
    """Dense peak in TFLOP/s of the stated precision, of the fastest one where none is stated."""
    try:
        peaks = device_by_key(row.words.get("gpu", "").lower()).peak_tflops
    except UnknownHardwareError:
        return None
    dtype = row.words.get("dtype", "").lower()
    if "16" in dtype and "8" not in dtype:
        return peaks.get("bf16") or peaks.get("fp16")
    fastest = max(peaks.values())
    return 2 * fastest if "fp4" in dtype else fastest


def _slack(row: TableRow, *names: str) -> float:
    return TOLERANCE + sum(row.slack.get(name, 0.0) for name in names)


def _agree(one: float, two: float, tolerance: float) -> bool:
    return two > 0 and abs(one / two - 1) <= tolerance


_RULES: tuple[tuple[str, Callable[[TableRow], Iterator[str]]], ...] = (
    ("degrees", _degrees),
    ("divisibility", _divisibility),
    ("name", _name),
    ("tokens", _tokens),
    ("flops", _flops),
    ("mfu", _mfu),
)
