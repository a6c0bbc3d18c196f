"""Random healthy configurations, none of which may be called wrong.

    python -m tests.verify.random_healthy [FILE] [--seeds FROM TO] [--megatron-lm CHECKOUT]

Each seed is a strategy on 2 to 8 ranks, a dense model or a mixture with some features, a learning rate
from 1e-5 to 2e-2, 1 to 30 iterations and one of four dtypes. Seeds from 1001 on are deep: a dense model of
6 to 12 layers with 64 to 256 tokens, 1 to 8 iterations, fp32 or bf16; half of them have context
parallelism. FILE (`random_healthy.csv` beside this one)
takes a line a seed; a seed that has one is left out, so that a run that was stopped goes on, and a later
one adds to it. What Megatron or the kit refuses is drawn again. At the end it prints how many held, by
dtype and by strategy.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from parakit.artifacts.verdict import VerifyOutcome
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.costs.constraints import find_violations
from parakit.experiments.verify.pairs import LaunchPair, compose_pair
from parakit.experiments.verify.verifier import Verifier
from parakit.launch.data import SMALL_SAMPLE, make_sample
from parakit.launch.job import parse_target
from parakit.launch.options import Options
from tests.judged import read_judged, write_judged
from tests.verify.bench import SMALL, PatientRanks

STRATEGIES = {
    "dense": {
        2: "dp2 tp2 sp2 pp2 vpp2 cp2 dp2-zero1 zero1 zero2 zero3",
        4: "tp2dp2 sp2dp2 tp2pp2 pp2dp2 cp2dp2 tp2cp2 tp4 sp4 pp4 dp4-zero1 sp2pp2 tp2dp2-zero1 pp2cp2",
        8: "tp2pp2dp2 sp2pp2dp2 tp2cp2dp2 tp2pp2dp2-zero1 tp4pp2",
    },
    "moe": {
        2: "dp2 ep2 tp2 sp2 pp2 cp2 ep2-zero1",
        4: "ep4 ep2dp2 sp2ep2 tp2ep2 pp2ep2 ep2dp2-zero1 sp2pp2 cp2ep2",
        8: "sp2pp2ep2 ep4dp2 tp2ep2dp2",
    },
}
DTYPES = ("", "--bf16", "--fp16", "--bf16 --grad-reduce-in-bf16")
FEATURES = {
    "dense": (
        *("--swiglu", "--normalization RMSNorm", "--position-embedding-type rope"),
        *("--qk-layernorm", "--untie-embeddings-and-output-weights", "--disable-bias-linear"),
        *("--group-query-attention --num-query-groups 2", "--seq-length 32", "--weight-decay 0.1"),
        *("--num-layers 6", "--hidden-size 96 --num-attention-heads 6", "--clip-grad 0.1"),
        *("--calculate-per-token-loss", "--micro-batch-size 1", "--init-method-std 0.05"),
    ),
    "moe": (
        *(
            "--moe-router-topk 1 --moe-router-pre-softmax",
            "--moe-router-topk 4",
            "--num-experts 4",
            "--qk-layernorm",
        ),
        *("--moe-shared-expert-intermediate-size 64", "--moe-router-score-function sigmoid"),
        *("--moe-router-load-balancing-type seq_aux_loss", "--moe-aux-loss-coeff 0.1", "--swiglu"),
        *("--moe-token-dispatcher-type alltoall", "--untie-embeddings-and-output-weights"),
        *(
            "--moe-router-dtype fp32",
            "--moe-layer-freq 2",
            "--group-query-attention --num-query-groups 2",
        ),
    ),
}


FIRST_DEEP_SEED = 1001
"""The first seed that draws a deep model with long sequences."""
DEEP_STRATEGIES = {
    True: {2: "cp2", 4: "cp4 cp2dp2 tp2cp2 pp2cp2"},
    False: {2: "dp2 tp2 sp2 pp2 vpp2 dp2-zero1", 4: "tp4 sp4 tp2pp2 sp2dp2 pp4 tp2dp2-zero1"},
}
"""Strategies of deep models by whether they have context parallelism, and by number of ranks."""
DEEP_FEATURES = (
    *("--swiglu", "--normalization RMSNorm", "--position-embedding-type rope", "--qk-layernorm"),
    *("--untie-embeddings-and-output-weights", "--disable-bias-linear", "--weight-decay 0.1"),
    *("--group-query-attention --num-query-groups 2", "--calculate-per-token-loss"),
)
JUDGED = Path(__file__).with_suffix(".csv")
COLUMNS = ("seed", "verdict", "share", "command")


@dataclass(frozen=True)
class Drawn:
    """A configuration."""

    seed: int
    strategy: str
    model: str
    devices: int
    iteration: int
    flags: str

    @property
    def target(self) -> str:
        """Of make."""
        return f"verify-{self.strategy}-{self.model}-{self.devices}cpu"

    @property
    def command(self) -> str:
        """What verifies it."""
        return f'make {self.target} ITERS={self.iteration} SEED={self.seed} EXTRA="{self.flags}"'

    def pair(self, megatron_lm: Path | None) -> LaunchPair:
        """To verify, in the small vocabulary."""
        options = Options(
            data=SMALL_SAMPLE,
            extra=(*shlex.split(self.flags), *SMALL),
            seed=self.seed,
            iterations=self.iteration,
            megatron_lm=megatron_lm,
        )
        return LaunchPair(parse_target(self.target.replace("verify-", "train-", 1), options))


def drawn(seed: int, megatron_lm: Path | None = None) -> Drawn:
    """The seed's first draw that neither Megatron's rules nor the kit refuse."""
    while True:
        draw = random.Random(f"{seed}")
        for _ in range(100):
            configuration = _draw(seed, draw)
            try:
                launches = compose_pair(configuration.pair(megatron_lm)).launches
            except (LaunchError, ValueError):
                continue
            # There a rank ends that has no part of a parameter.
            ends = "--fp16" in configuration.flags and configuration.strategy in ("zero2", "zero3")
            # Not healthy: docs/upstream/experts-of-two-stages-alike.md.
            alike = "pp" in configuration.strategy and "ep" in configuration.strategy
            if not (ends or alike) and not any(find_violations(launch.spec) for launch in launches):
                return configuration
        raise ValueError(f"Seed {seed}: all of 100 draws are refused.")


def _draw_deep(seed: int, draw: random.Random) -> Drawn:
    """Return a draw of a dense model of 6 to 12 layers with 64 to 256 tokens."""
    devices = draw.choices((2, 4), (70, 30))[0]
    strategies = DEEP_STRATEGIES[draw.random() < 0.5][devices].split()
    tokens = draw.choice((64, 96, 128, 192, 256))
    flags = [
        f"--num-layers {draw.choice((6, 8, 8, 10, 12))}",
        f"--seq-length {tokens} --max-position-embeddings {tokens}",
        *draw.sample(DEEP_FEATURES, draw.choice((0, 0, 0, 1, 2, 3))),
    ]
    if draw.random() < 0.5:
        flags.append(f"--lr {10 ** draw.uniform(-5, -1.7):.2g} --min-lr 0")
    if draw.random() < 0.4:
        flags.append("--bf16")
    iteration = draw.choice((1, 2, 2, 3, 3, 4, 5, 6, 8))
    strategy = draw.choice(strategies)
    return Drawn(seed, strategy, "gpt2-tiny", devices, iteration, " ".join(flags))


def _draw(seed: int, draw: random.Random) -> Drawn:
    if seed >= FIRST_DEEP_SEED:
        return _draw_deep(seed, draw)
    family = draw.choice(("dense", "dense", "moe"))
    devices = draw.choices((2, 4, 8), (70, 25, 5))[0]
    features = draw.sample(FEATURES[family], draw.randint(0, 4))
    # As many of one decade as of another.
    rate = f"--lr {10 ** draw.uniform(-5, -1.7):.2g} --min-lr 0"
    dtype = draw.choice(DTYPES)
    iteration = min(draw.choice((1, 2, 2, 3, 3, 5, 5, 8, 13, 21, 30)), 30 if devices == 2 else 8)
    return Drawn(
        seed,
        draw.choice(STRATEGIES[family][devices].split()),
        "gpt2-tiny" if family == "dense" else "moe-tiny",
        devices,
        iteration,
        " ".join((rate, dtype, *features)).replace("  ", " "),
    )


def table(lines: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """As Markdown: how many are judged and how many held, by dtype and strategy, and the worst share."""
    yield "| | judged | held | largest error/tolerance |\n|---|---|---|---|"
    groups = defaultdict(list)
    for line in lines:
        target, command = line["command"].split()[1], line["command"]
        strategy = parse_target(target.replace("verify-", "train-", 1), Options()).strategy
        dtype = (
            next((dtype_name for dtype_name in reversed(DTYPES[1:]) if dtype_name in command), "")
            or "fp32"
        )
        for name in (dtype.replace("--", ""), strategy, "all"):
            groups[name].append(line)
    for name, those in sorted(
        groups.items(), key=lambda group: (len(group[1]), group[0]), reverse=True
    ):
        shares = [float(row["share"]) for row in those if row["share"]]
        held = sum(row["verdict"] == VerifyOutcome.HELD for row in those)
        yield f"| {name} | {len(those)} | {held} | {max(shares, default=0.0):.2f} |"


def main() -> int:
    """Verify what has no outcome yet; 1 if any of the file is called wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=JUDGED)
    parser.add_argument("--seeds", type=int, nargs=2, default=(1, 200), metavar=("FROM", "TO"))
    parser.add_argument("--megatron-lm", type=Path)
    arguments = parser.parse_args()
    lines = read_judged(arguments.file)
    seeds = range(arguments.seeds[0], arguments.seeds[1] + 1)
    missing = sorted({*seeds} - {int(line["seed"]) for line in lines})
    (ROOT / "runs").mkdir(exist_ok=True)
    make_sample(SMALL_SAMPLE, Console(quiet=True))
    ranks = PatientRanks(Options(megatron_lm=arguments.megatron_lm))
    with (
        tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix=".random-healthy-") as folder,
        closing(ranks),
    ):
        verifier = Verifier(Path(folder), ranks)
        for seed in missing:
            configuration = drawn(seed, arguments.megatron_lm)
            verdict = verifier.verify(configuration.pair(arguments.megatron_lm)).verdict
            verifier.remove_references()
            sentence = verdict.reason or verdict.sentence
            print(f"{seed} {configuration.command}: {sentence}", flush=True)
            if (
                " ended with " in sentence
            ):  # Of the machine, not of the comparison: to be tried again.
                continue
            share = "" if verdict.worst_ratio is None else f"{verdict.worst_ratio:.3g}"
            values = (str(seed), str(verdict.verdict), share, configuration.command)
            lines.append(dict(zip(COLUMNS, values, strict=True)))
            by_seed = sorted(lines, key=lambda line: int(line["seed"]))
            write_judged(arguments.file, COLUMNS, by_seed)
    print("\n".join(table(lines)))
    return int(any(line["verdict"] == VerifyOutcome.DIFFERS for line in lines))


if __name__ == "__main__":
    sys.exit(main())
