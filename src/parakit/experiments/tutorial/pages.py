"""Pages of the tutorial's chapters: `python -m parakit.experiments.tutorial.pages docs/tutorial` writes them.

A page has the chapter's question, a table of published and predicted figures, and a picture of the trend. Then it has
what each run teaches, what does not follow from the rows, and the author's exercises with a command each.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from parakit.experiments.tutorial.chapters import Chapter, ChapterPlot, read_chapters
from parakit.experiments.tutorial.claims import (
    Claim,
    checks_of,
    evaluate_expression,
    read_claims,
)
from parakit.experiments.tutorial.predict import (
    UNITS,
    PredictedRow,
    predict_rows,
    prediction_table,
    summarise_errors,
)
from parakit.experiments.tutorial.rows import read_rows, rows_of_chapter
from parakit.formatting.svg import COLOURS, svg_figure
from parakit.formatting.units import joined

PUBLISHED_GPU = "h100"
_REPOSITORY = "https://github.com/vuiseng9/megatron-tutorials"
_QUESTION_WORDS = frozenset({"does", "how", "is"})
"""First words of headings that ask a question."""
_SPELLINGS = {
    word.lower(): word for word in ("EP", "ETP", "MACs", "MLP", "OLMoE", "SP", "TP", "VPP")
}
"""Spellings of words in headings, by the words of a claim's key."""


def render_chapter(chapter: Chapter, predictions: Sequence[PredictedRow]) -> str:
    """Return the page of a chapter as Markdown."""
    name, first_id = chapter.name, predictions[0].row.id
    claims = [render_claim(claim) for claim in read_claims() if claim.chapter == name]
    lessons = []
    for ids, text in chapter.lessons.items():
        lessons.append(f"- **{ids.replace(' ', ', ')}**: {text}")
    exercises = []
    for exercise in chapter.exercises:
        command = f"```bash\n{exercise.command}\n```"
        exercises.append(f"**{exercise.question}** {exercise.answer}\n\n{command}")
    plot_titles = joined([plot.title for plot in chapter.plots])
    parts = [
        f"# {chapter.title}",
        f"**{chapter.question}** {chapter.answer}",
        f"Chapter `{name}` of [the tutorial](README.md): {len(predictions)} runs on H100 80 GB. Each id is a "
        f"target, such as `make {first_id}`.",
        f"```bash\nmake experiment NAME=tutorial-{name} GPU=h100            # the table below, without a GPU\n"
        f"make reproduce NAME=tutorial CHAPTER={name}               # train it on eight GPUs; resumable\n"
        f"make reproduce NAME=tutorial CHAPTER={name} DEVICES=8cpu  # train it in small on CPU ranks\n```",
        "## Published and predicted",
        f"{summarise_errors(predictions)} {UNITS}",
        prediction_table(predictions),
        f"![{plot_titles}]({name}.svg)",
        "## What each run teaches",
        "\n".join(lessons),
        "## What does not follow from the rows",
        "\n\n".join(claims),
        "## The author's exercises",
        "\n\n".join(exercises),
        "## On CPU ranks",
        f"Small runs show {chapter.cpu_shows.strip()} They cannot {chapter.cpu_cannot.strip()}",
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def render_claim(claim: Claim) -> str:
    """Return a claim with what holds instead, its arithmetic and its source."""
    lines = [f"**The tutorial says:** {claim.says}", f"**What holds:** {claim.holds}"]
    checks = checks_of(claim)
    if checks:
        lines.append("\n".join(f"- `{check}`" for check in checks))
    if claim.source:
        lines.append(f"Source: `{claim.source}` of Megatron core_v0.14.0.")
    return "\n\n".join((f"### {heading_of_claim(claim.key)}", *lines))


def heading_of_claim(key: str) -> str:
    """Return a claim's heading: the words of its key, with a question mark if the first word asks.

    The anchor of the heading is the key, because anchors have neither capitals nor question marks.
    """
    first, *further = [_SPELLINGS.get(word, word) for word in key.split("-")]
    capitalised = first[0].upper() + first[1:]
    heading = " ".join((capitalised, *further))
    return f"{heading}?" if first in _QUESTION_WORDS else heading


def render_overview() -> str:
    """Return the page that introduces the tutorial, lists its chapters and counts what does not follow."""
    claims_by_chapter = Counter(claim.chapter for claim in read_claims())
    chapters = []
    for chapter in read_chapters():
        num_runs = len(rows_of_chapter(chapter.name))
        chapters.append(
            f"- [{chapter.title}]({chapter.name}.md), {num_runs} runs, "
            f"{claims_by_chapter[chapter.name]} claims corrected. {chapter.question}"
        )
    return _OVERVIEW.format(
        repository=_REPOSITORY,
        runs=len(read_rows()),
        chapters="\n".join(chapters),
        claims=claims_by_chapter.total(),
    )


_OVERVIEW = """\
# The tutorial: 66 published runs on eight H100

[Megatron, Transformed!]({repository}) is a hands-on tutorial of Megatron-LM by the author of the H200 notes. Most of
its text stands beside a run, and every run is a make target. Check its claims before you use them:
**{claims} claims do not follow from its own rows, or from Megatron's source, and three of them change a conclusion**
([below](#what-the-tables-really-say)). This kit has all {runs} runs under their published names, predicts them, and
explains them.

The published runs had Megatron core_r0.14.0 in NGC 25.09, bf16, openwebtext-10k and 100 iterations.

```bash
DRY_RUN=1 make 446                          # the command, and what is missing here
make 446 IMAGE=25.09-py3                    # train it as published, on eight GPUs with Docker
make experiment NAME=tutorial-pp GPU=h100   # a chapter predicted, without a GPU
make reproduce NAME=tutorial CHAPTER=pp DEVICES=8cpu
```

The last command trains a chapter in small on CPU ranks. `MEGATRON_LM=<a checkout of core_r0.14.0>` runs it with the
tutorial's Megatron: runs 122, 212, 302, 283, 424, 446 and 504 were trained in small with commit 32ad5c89 (0.14.1).
`CALIBRATE="210 ms on 231"` gives a prediction the host of the published machine. The times of all chapters then have a
median error of 5.9%, and only runs 442, 511 and 512 have an error above 20%
([why](../../src/parakit/planner/readings/README.md)).

{chapters}

## What the tables really say

Each chapter lists the claims that do not follow from the rows, with the arithmetic, and a test computes every figure.
Most are labels and percentages. Three change a conclusion:

- **A floor of host time** explains weak scaling with 8 samples, strong scaling, and why many micro batches are slow.
  Launching a layer's kernels takes about 5 ms there, on any number of devices ([no-stall](pp.md#no-stall),
  [strong-scaling-floor](tp.md#strong-scaling-floor)).
- **The virtual stages are not those of the labels.** The flag counts layers
  ([layers-not-stages](pp.md#layers-not-stages)).
- **The distributed optimizer is ZeRO-1.** The memory of the mixture-of-experts runs shows it ([zero-1](dp.md#zero-1)).
"""
"""Markdown of the overview, with fields for what is counted."""


def draw_plots(chapter: Chapter, path: Path) -> None:
    """Draw the plots of a chapter beside each other, and write them as SVG."""
    with svg_figure(path, f"tutorial-{chapter.name}", 4.6 * len(chapter.plots), 3.2) as figure:
        panels = figure.subplots(1, len(chapter.plots), squeeze=False)[0]
        for axes, plot in zip(panels, chapter.plots, strict=True):
            _draw_plot(axes, plot)


def _draw_plot(axes: object, plot: ChapterPlot) -> None:
    """Draw the series of a plot as lines with a marker per run, from 0 upwards."""
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    all_positions: set[float] = set()
    for series, colour in zip(plot.series, COLOURS, strict=False):
        positions = [position for position, _ in series.points]
        values = [evaluate_expression(expression) for _, expression in series.points]
        axes.plot(positions, values, color=colour, marker="o", label=series.name)
        all_positions.update(positions)
    axes.set(xlabel=plot.x, ylabel=plot.y, title=plot.title)
    axes.set_xticks(sorted(all_positions))
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def write_pages(folder: Path) -> list[Path]:
    """Write the pages and pictures of all chapters into a folder, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "README.md"]
    paths[0].write_text(render_overview(), encoding="utf-8")
    for chapter in read_chapters():
        page, picture = folder / f"{chapter.name}.md", folder / f"{chapter.name}.svg"
        predictions = predict_rows(rows_of_chapter(chapter.name), PUBLISHED_GPU)
        page.write_text(render_chapter(chapter, predictions), encoding="utf-8")
        draw_plots(chapter, picture)
        paths += [page, picture]
    return paths


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
