"""How many layers each pipeline stage has where they are not laid evenly.

The arithmetic of `get_num_layers_to_build` (`megatron/core/transformer/transformer_block.py`) and the
refusals of `TransformerConfig`, at core_v0.19.0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from parakit.config.flags import Flags, format_fields_as_flags

LAYOUT_FLAG = "--pipeline-model-parallel-layout"


@dataclass(frozen=True)
class StageSplit:
    """What makes pipeline stages unequal; the default is an even split."""

    first: int = 0
    """Layers of the first stage; 0 is as many as the others have."""
    last: int = 0
    """Layers of the last stage; 0 is as many as the others have."""
    embedding: bool = False
    """The embedding counts as a layer of the first stage."""
    loss: bool = False
    """The output layer and the loss count as a layer of the last stage."""
    layout: str = ""
    """Every virtual stage in the model's order, as Megatron writes them: `Ett|(tt|)*5tmL` are embedding,
    layers, a depth of multi-token prediction and loss on seven (`pipeline_parallel_layer_layout.py`)."""

    @property
    def counted_ends(self) -> int:
        """Layers that are none."""
        return self.embedding + self.loss

    @property
    def flags(self) -> tuple[str, ...]:
        """Megatron's."""
        return format_fields_as_flags(self, "stages")

    def virtual_stages_in_layout(self, pipeline: int) -> int:
        """Virtual stages of each of so many pipeline ranks in a layout; 1 without one."""
        return max(1, len(_stages_of_layout(self.layout)) // pipeline)

    @property
    def mtp_layers_in_layout(self) -> int:
        """Of multi-token prediction in a layout."""
        return sum(stage.count("m") for stage in _stages_of_layout(self.layout))

    def layers_per_chunk(
        self, layers: int, pipeline: int, virtual: int, rank: int
    ) -> tuple[int, ...]:
        """Layers of each virtual stage of a pipeline rank (floors where a degree does not divide)."""
        if self is EVEN_SPLIT:  # By far the most of a search's.
            return (layers // pipeline // virtual,) * virtual
        if self.layout:
            return tuple(s.count("t") for s in _stages_of_layout(self.layout)[rank::pipeline])
        whole = self._of_stage(layers, pipeline, rank)
        chunks = [whole // virtual] * virtual
        if self.embedding and rank == 0:
            chunks[0] -= 1
        if self.loss and rank == pipeline - 1:
            chunks[-1] -= 1
        return tuple(chunks)

    def find_problem(self, layers: int, pipeline: int, virtual: int) -> str:
        """Why Megatron does not lay `layers` so; empty if it does."""
        stages, all_layers = pipeline * virtual, layers + self.counted_ends
        if self.layout:
            return self._layout_problem(layers, stages)
        if self.counted_ends and (self.first or self.last):
            return "a first or last stage of its own excludes counting embedding or loss"
        if min(self.first, self.last) < 0:
            return "a stage has at least one layer"
        if self.first or self.last:
            return self._own_stages_problem(layers, pipeline, virtual)
        if all_layers % stages:
            with_ends = f"{all_layers} with embedding or loss counted"
            return f"{with_ends if self.counted_ends else 'they'} do not divide"
        smallest = self.layers_per_chunk(layers, pipeline, virtual, 0)[0]
        last = self.layers_per_chunk(layers, pipeline, virtual, pipeline - 1)[-1]
        return "a stage would have less than no layer" if min(smallest, last) < 0 else ""

    def _layout_problem(self, layers: int, wanted: int) -> str:
        stages = _stages_of_layout(self.layout)
        text = "".join(stages)
        wrong = {
            "a layout excludes other ways to lay layers": self.first
            or self.last
            or self.counted_ends,
            "it is not E, layers t, depths m of multi-token prediction and L": not re.fullmatch(
                "Et*m*L", text
            ),
            f"it has {len(stages)} stages": len(stages) != wanted,
            f"it has {text.count('t')} layers": text.count("t") != layers,
            "depths are planned on the last stage alone": any("m" in s for s in stages[:-1]),
            # A stage of its own may have the embedding, and one the loss.
            "they do not fill the stages": not all("t" in stage for stage in stages[1:-1]),
        }
        return next((words for words, found in wrong.items() if found), "")

    def _own_stages_problem(self, layers: int, pipeline: int, virtual: int) -> str:
        left, stages = layers - self.first - self.last, pipeline - (self.first > 0)
        stages -= self.last > 0
        if stages < 0 or left < 0 or (left == 0) != (stages == 0):
            return f"{left} layers are left for {max(0, stages)} other stages"
        if stages and left % stages:
            return f"the {left} layers left do not divide over {stages} other stages"
        own = [count for count in (self.first, self.last) if count]
        if any(count % virtual for count in (*own, *([left // stages] if stages else []))):
            return f"{virtual} virtual stages do not divide a stage's layers"
        return ""

    def _of_stage(self, layers: int, pipeline: int, rank: int) -> int:
        if self.first and rank == 0:
            return self.first
        if self.last and rank == pipeline - 1:
            return self.last
        stages = pipeline - (self.first > 0) - (self.last > 0)
        return (layers - self.first - self.last + self.counted_ends) // max(1, stages)


EVEN_SPLIT = StageSplit()


def even_layout(layers: int, stages: int) -> StageSplit:
    """A layout as even as can be, the ends with fewer."""
    few, more = divmod(layers, stages)
    return _layout([few + (1 <= place <= more) for place in range(stages)])


def front_loaded_layout(layers: int, stages: int, depths: int) -> StageSplit:
    """A layout whose stages have as many as any needs and whose last has what is left, which makes room
    there for depths of multi-token prediction and the loss."""
    each = -(-layers // stages)
    return _layout([min(each, max(0, layers - place * each)) for place in range(stages)], depths)


def _layout(counts: Sequence[int], depths: int = 0) -> StageSplit:
    return StageSplit(layout=f"E{'|'.join('t' * count for count in counts)}{'m' * depths}L")


_REPEATED = re.compile(r"(?:\(([^()*]+)\)|([A-Za-z|]))\*([0-9]{1,3})(?![0-9*])")
"""Letters in parentheses or one alone, and how often: a model has no thousand layers."""


@lru_cache(maxsize=4096)
def _stages_of_layout(layout: str) -> tuple[str, ...]:
    """Commas mean nothing, `*` repeats one letter or what is in parentheses; a `*` that is left over is
    part of no layout."""
    text = layout.replace(",", "")
    while found := _REPEATED.search(text):
        whole = (found[1] or found[2]) * int(found[3])
        text = text[: found.start()] + whole + text[found.end() :]
    return tuple(text.split("|"))


def parse_stage_split(flags: Flags) -> StageSplit:
    """What the flags say; Megatron ignores them without pipeline stages."""
    if flags.integer("--pipeline-model-parallel-size") == 1:
        return EVEN_SPLIT
    return StageSplit(**flags.fields("stages"))


@lru_cache(maxsize=4096)
def choose_stage_split(layers: int, pipeline: int) -> StageSplit | None:
    """Even where the degree divides the layers, else uneven; None if neither can be."""
    return EVEN_SPLIT if layers % pipeline == 0 else find_uneven_split(layers, pipeline, 1)


@lru_cache(maxsize=4096)
def virtual_degrees(stages: StageSplit, layers: int, pipeline: int) -> tuple[int, ...]:
    """Numbers of virtual stages that this split admits."""
    most = -(-(layers + stages.counted_ends) // pipeline)
    return tuple(v for v in range(1, most + 1) if not stages.find_problem(layers, pipeline, v))


def find_uneven_split(layers: int, pipeline: int, virtual: int) -> StageSplit | None:
    """The split for degrees that do not divide the layers; None if there is none.

    The ends are counted as layers where that divides, since they take about one's time; else the last
    stage, which has the loss, is given what is left.
    """
    for counted in (
        StageSplit(embedding=True, loss=True),
        StageSplit(loss=True),
        StageSplit(embedding=True),
    ):
        ends = (counted.layers_per_chunk(layers, pipeline, 1, rank) for rank in (0, pipeline - 1))
        if not counted.find_problem(layers, pipeline, virtual) and all(map(sum, ends)):
            return counted
    others = -(-layers // (pipeline * virtual)) * virtual
    shorter = StageSplit(last=layers - (pipeline - 1) * others)
    if shorter.last > 0 and not shorter.find_problem(layers, pipeline, virtual):
        return shorter
    return None
