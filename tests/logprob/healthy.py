"""Pairs of a trainer and a serving engine without a fault, none of which may be called wrong.

    python -m tests.logprob.healthy [FILE] [--seed SEED] [--pairs COUNT]

Each round takes one pair of every model, and the rounds go through the layouts of the model in turn. The seed shuffles
layouts, serving engines and dtypes.
FILE (`healthy.csv` beside this module) gets a line per pair. A pair that has a line is not judged again, so an
interrupted run can go on. At the end a table counts the pairs that held, by model, layout, serving engine and dtype.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parakit.artifacts.verdict import VerifyOutcome
from parakit.convert import CONFIGS
from parakit.logprob import LogprobVerdict
from tests.judged import read_judged, write_judged
from tests.logprob.injected import Fault, Laboratory
from tests.verify.bench import PatientRanks

JUDGED = Path(__file__).with_suffix(".csv")
COLUMNS = (
    *("number", "model", "train", "serve", "dtype", "seed", "verdict"),
    *("relative_error", "tolerance", "kl_nats", "generation"),
)
SEED, NUM_PAIRS = 67, 112

LATENT = (
    "--multi-latent-attention --position-embedding-type rope --kv-lora-rank 16 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 24"
)
"""Flags of multi-head latent attention. `parakit.convert` has no family with it, so Megatron serves these models."""


@dataclass(frozen=True)
class Family:
    """Model with the layouts and serving engines in which its pairs are judged."""

    model: str
    layouts: str
    engines: str = "hf megatron tp2 pp2"
    flags: str = ""


_DENSE, _EXPERTS = "tp2 sp2 pp2 dp2 cp2 tp2pp2", "ep2 pp2 dp2 sp2 cp2 ep2pp2"
FAMILIES = {
    model: Family(
        model,
        _EXPERTS if "num_local_experts" in config or "num_experts" in config else _DENSE,
    )
    for model, config in CONFIGS.items()
} | {
    # TP pads the vocabulary of the random GPT-2, and transformers counts no padding.
    "gpt2": Family("gpt2", "pp2 dp2 cp2", "hf megatron pp2"),
    "mla-tied": Family("gpt2-tiny", _DENSE, "megatron tp2 sp2 pp2 cp2", LATENT),
    "mla-untied": Family(
        *("gpt2-tiny", _DENSE, "megatron tp2 sp2 pp2 cp2"),
        f"{LATENT} --q-lora-rank 32 --qk-layernorm --normalization RMSNorm --swiglu "
        "--untie-embeddings-and-output-weights",
    ),
    "mla-experts": Family(
        *("moe-tiny", _EXPERTS, "megatron ep2 pp2 sp2"),
        f"{LATENT} --q-lora-rank 32 --qk-layernorm --swiglu --moe-shared-expert-intermediate-size 64",
    ),
}
"""Families by name: the random models of Hugging Face, and models of the kit with multi-head latent attention."""


def list_pairs(family: str) -> list[Fault]:
    """Return all pairs of a family: layouts, serving engines and dtypes. The trainer's layout is never served."""
    members = FAMILIES[family]
    return [
        Fault(
            f"{family}-{train}-{serve}",
            members.model,
            train,
            serve,
            "",
            "",
            members.flags,
            is_bf16=is_bf16,
        )
        for train in members.layouts.split()
        for serve in members.engines.split()
        for is_bf16 in (False, True)
        if train != serve
    ]


def draw_pairs(seed: int, count: int) -> list[Fault]:
    """Return `count` pairs, evenly over families and their layouts; a number per pair seeds its weights."""
    draw = random.Random(seed)
    pairs_by_family = [_shuffle_evenly(list_pairs(family), draw) for family in FAMILIES]
    rounds = zip(*pairs_by_family, strict=False)
    pairs = [pair for pairs in rounds for pair in pairs][:count]
    return [replace(pair, seed=number) for number, pair in enumerate(pairs, 1)]


def _shuffle_evenly(pairs: Sequence[Fault], draw: random.Random) -> list[Fault]:
    """Return the pairs in random order, with one pair of every layout before the second pair of any layout."""
    shuffled = draw.sample(pairs, len(pairs))
    layouts = list(dict.fromkeys(pair.train for pair in shuffled))
    num_before = dict.fromkeys(layouts, 0)
    order = {}
    for pair in shuffled:
        order[pair] = (num_before[pair.train], layouts.index(pair.train))
        num_before[pair.train] += 1
    return sorted(shuffled, key=order.__getitem__)


def get_family(pair: Fault) -> str:
    """Return the name of the family of a pair."""
    return pair.id.removesuffix(f"-{pair.train}-{pair.serve}")


def describe(number: int, pair: Fault, verdict: LogprobVerdict) -> dict[str, str]:
    """Return the line of a judged pair; the column `generation` says whether the static engine ran in the layout."""
    values = (
        *(str(number), get_family(pair), pair.train, pair.serve),
        *("bf16" if pair.is_bf16 else "fp32", str(pair.seed), str(verdict.outcome)),
        *(f"{verdict.gap.relative_error:.2e}", f"{verdict.relative_tolerance:.2e}"),
        *(f"{verdict.gap.kl_nats:.2e}", "refused" if verdict.not_compared else "compared"),
    )
    return dict(zip(COLUMNS, values, strict=True))


def count_held(lines: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield a Markdown table: pairs judged and held, and the largest error divided by its tolerance."""
    yield "| | judged | held | largest error/tolerance |\n|---|---|---|---|"
    lines_by_group = defaultdict(list)
    for line in lines:
        for name in (
            "all",
            line["model"],
            line["train"],
            f"against {line['serve']}",
            line["dtype"],
        ):
            lines_by_group[name].append(line)
    for name, members in sorted(
        lines_by_group.items(), key=lambda group: (-len(group[1]), group[0])
    ):
        ratios = [float(line["relative_error"]) / float(line["tolerance"]) for line in members]
        held = sum(line["verdict"] == VerifyOutcome.HELD for line in members)
        yield f"| {name} | {len(members)} | {held} | {max(ratios):.2f} |"


def main() -> int:
    """Judge the pairs that have no line; return 1 if a pair of the file was called wrong or could not be judged."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=JUDGED)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS)
    arguments = parser.parse_args()
    importlib.import_module("transformers.models.auto.modeling_auto")
    lines = read_judged(arguments.file)
    judged = {int(line["number"]) for line in lines}
    num_failed = 0
    ranks = PatientRanks()
    with tempfile.TemporaryDirectory() as scratch:
        laboratory = Laboratory(Path(os.environ.get("LABORATORY", scratch)), ranks)
        for number, pair in enumerate(draw_pairs(arguments.seed, arguments.pairs), 1):
            if number in judged:
                continue
            try:
                verdict = laboratory.judge(pair)
            except ValueError as error:
                print(f"{number} {pair.id}: failed: {error}", flush=True)
                num_failed += 1
                continue
            lines.append(describe(number, pair, verdict))
            write_judged(arguments.file, COLUMNS, lines)
            print(" ".join(lines[-1].values()), verdict.not_compared, flush=True)
    ranks.close()
    print("\n".join(count_held(lines)))
    num_wrong = sum(line["verdict"] != VerifyOutcome.HELD for line in lines)
    return int(num_wrong + num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
