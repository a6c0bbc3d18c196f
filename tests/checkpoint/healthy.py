"""`python -m tests.checkpoint.healthy FOLDER [CHECKOUT…]`: no fault may be found in healthy checkpoints.

Each Megatron, the installed one and those of the checkouts, saves two iterations in eight layouts below
FOLDER; every piece is read, and a checkpoint is compared with itself. Prints a row a checkpoint, and
ends with 1 if a fault was found in one.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from parakit.artifacts.run import CHECKPOINTS_FOLDER, read_run
from parakit.checkpoint.checks import find_problems, judge_loading
from parakit.checkpoint.compare import compare_weights
from parakit.checkpoint.contents import read_contents
from parakit.config.errors import LaunchError
from parakit.launch.options import Saving
from tests.checkpoint.forked import Runs, forked

CASES = (
    ("tp2", "gpt2-tiny", ""),
    ("sp2", "gpt2-tiny", "--untie-embeddings-and-output-weights"),
    ("pp2", "gpt2-tiny", "--bf16"),
    ("vpp2", "gpt2-tiny", "--swiglu --disable-bias-linear"),
    ("cp2", "gpt2-tiny", "--group-query-attention --num-query-groups 2"),
    ("zero1", "gpt2-tiny", "--bf16"),
    ("ep2", "moe-tiny", ""),
    ("dp2", "moe-tiny", "--bf16"),
)


def faults(run: Path, strategy: str) -> Iterator[str]:
    """What is said of a checkpoint that nothing was done to."""
    contents = read_contents(run / CHECKPOINTS_FOLDER)
    yield from find_problems(contents, reads_pieces=True)
    verdict = judge_loading(contents, strategy)
    if verdict.verdict != "loads":
        yield f"its own layout {verdict.verdict}: {' '.join(verdict.reasons)}"
    yield from (
        f"{relation.name} {relation.relation}"
        for relation in compare_weights(contents, contents)
        if not relation.is_same
    )


def row(
    runs: Runs, checkout: Path | None, strategy: str, model: str, extra: str
) -> tuple[str, bool]:
    """What is printed of one, and whether it was saved and no fault is found in it."""
    try:
        run = runs.train(
            f"train-{strategy}-{model}-2cpu",
            iterations=2,
            saving=Saving(2),
            shared_start=False,
            extra=tuple(extra.split()),
            megatron_lm=checkout,
            allow_unknown_megatron=checkout is not None,
        )
    except (LaunchError, AssertionError) as error:
        return f"{checkout} {strategy} {model} {extra}: not saved: {error}", False
    sentences = list(faults(run, strategy))
    version = read_run(run).entry.megatron_version
    return (
        f"{version} {strategy} {model} {extra}: {'; '.join(sentences) or 'no fault'}",
        not sentences,
    )


def main(folder: Path, checkouts: list[Path]) -> int:
    """Save and inspect them all."""
    good = []
    with forked(folder) as runs:
        for checkout in (None, *checkouts):
            for case in CASES:
                line, is_good = row(runs, checkout, *case)
                print(line, flush=True)
                good.append(is_good)
    print(f"{len(good)} checkpoints, {good.count(False)} of them not saved or with a fault.")
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), list(map(Path, sys.argv[2:]))))
