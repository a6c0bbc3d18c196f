"""How many layers each pipeline stage has if stages are unequal.

The arithmetic is that of `get_num_layers_to_build`
(`megatron/core/transformer/transformer_block.py`), and the checks are those of `TransformerConfig`,
at core_v0.19.0. A layout is the text of `--pipeline-model-parallel-layout`, such as `Ett|ttL`. A
chunk is one virtual stage of a rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from parakit.config.flags import Flags, format_fields_as_flags

LAYOUT_FLAG = "--pipeline-model-parallel-layout"


@dataclass(frozen=True)
class StageSplit:
    """Placement of layers on pipeline stages. The default is an even split."""

    first: int = 0
    """Layers of the first stage; 0 means as many as other stages."""
    last: int = 0
    """Layers of the last stage; 0 means as many as other stages."""
    embedding: bool = False
    """True if the embedding counts as one layer of the first stage."""
    loss: bool = False
    """True if the output layer and the loss count as one layer of the last stage."""
    layout: str = ""
    """All virtual stages in the model's order, as Megatron writes them
    (`pipeline_parallel_layer_layout.py`). `Ett|(tt|)*5tmL` places embedding, layers, one layer of
    multi-token prediction and the loss on 7 stages.
    """

    @property
    def counted_ends(self) -> int:
        """Number of ends that count as a layer: embedding and loss, 0 to 2."""
        return self.embedding + self.loss

    @property
    def flags(self) -> tuple[str, ...]:
        """Megatron's flags for this placement."""
        return format_fields_as_flags(self, "stages")

    def virtual_stages_in_layout(self, pipeline: int) -> int:
        """Return the virtual stages per rank of a layout over `pipeline` ranks; 1 without a layout."""
        return max(1, len(_split_layout(self.layout)) // pipeline)

    @property
    def mtp_layers_in_layout(self) -> int:
        """Layers of multi-token prediction in the layout."""
        return sum(stage.count("m") for stage in _split_layout(self.layout))

    def layers_per_chunk(
        self, layers: int, pipeline: int, virtual: int, rank: int
    ) -> tuple[int, ...]:
        """Return the number of layers of each virtual stage of a pipeline rank.

        Numbers are rounded down if stages do not divide the layers. `find_problem` reports such splits.
        """
        if self is EVEN_SPLIT:
            # Nearly all splits of a search are even, so this case comes first.
            return (layers // pipeline // virtual,) * virtual
        if self.layout:
            stages_of_rank = _split_layout(self.layout)[rank::pipeline]
            return tuple(stage.count("t") for stage in stages_of_rank)
        layers_of_rank = self._count_stage_layers(layers, pipeline, rank)
        chunks = [layers_of_rank // virtual] * virtual
        if self.embedding and rank == 0:
            chunks[0] -= 1
        if self.loss and rank == pipeline - 1:
            chunks[-1] -= 1
        return tuple(chunks)

    def find_problem(self, layers: int, pipeline: int, virtual: int) -> str:
        """Return the reason why Megatron refuses to place `layers` layers on the stages in this way.

        The result is empty if Megatron accepts the split.
        """
        if self.layout:
            return self._find_layout_problem(layers, pipeline * virtual)
        if self.counted_ends and (self.first or self.last):
            return "a first or last stage of its own excludes counting embedding or loss"
        if min(self.first, self.last) < 0:
            return "a stage has at least one layer"
        if self.first or self.last:
            return self._find_end_stage_problem(layers, pipeline, virtual)
        return self._find_even_split_problem(layers, pipeline, virtual)

    def _find_even_split_problem(self, layers: int, pipeline: int, virtual: int) -> str:
        """Return the reason why the layers cannot be split evenly over all virtual stages.

        Embedding and loss count as layers if this split says so. The result is empty if the split is possible.
        """
        all_layers = layers + self.counted_ends
        if all_layers % (pipeline * virtual):
            if self.counted_ends:
                return f"{all_layers} with embedding or loss counted do not divide"
            return "they do not divide"
        first_chunk = self.layers_per_chunk(layers, pipeline, virtual, 0)[0]
        last_chunk = self.layers_per_chunk(layers, pipeline, virtual, pipeline - 1)[-1]
        if min(first_chunk, last_chunk) < 0:
            return "a stage would have fewer than 0 layers"
        return ""

    def _find_layout_problem(self, layers: int, num_stages: int) -> str:
        """Return the reason why Megatron or the planner refuses the layout for `num_stages` virtual
        stages.

        The result is empty if both accept the layout.
        """
        if self.first or self.last or self.counted_ends:
            return "a layout excludes other ways to place layers"
        stages = _split_layout(self.layout)
        letters = "".join(stages)
        if not re.fullmatch("Et*m*L", letters):
            return "it is not E, t for each layer, m for each MTP layer and L"
        if len(stages) != num_stages:
            return f"it has {len(stages)} stages"
        if letters.count("t") != layers:
            return f"it has {letters.count('t')} layers"
        if any("m" in stage for stage in stages[:-1]):
            return "MTP layers are planned on the last stage only"
        # The first stage may have only the embedding, and the last one only the loss.
        inner_stages = stages[1:-1]
        have_layers = all("t" in stage for stage in inner_stages)
        return "" if have_layers else "a stage between the ends has no layer"

    def _find_end_stage_problem(self, layers: int, pipeline: int, virtual: int) -> str:
        """Return the reason why Megatron refuses a split that states the layers of the first or last
        stage.

        The result is empty if Megatron accepts the split.
        """
        layers_per_stage = [count for count in (self.first, self.last) if count]
        remaining_layers = layers - sum(layers_per_stage)
        other_stages = pipeline - len(layers_per_stage)
        is_possible = other_stages >= 0 and remaining_layers >= 0
        are_both_used_up = remaining_layers == 0 and other_stages == 0
        is_one_used_up = remaining_layers == 0 or other_stages == 0
        if not is_possible or (is_one_used_up and not are_both_used_up):
            return f"{remaining_layers} layers are left for {max(0, other_stages)} other stages"
        if other_stages:
            if remaining_layers % other_stages:
                return f"the other {remaining_layers} layers do not divide over {other_stages} other stages"
            layers_per_stage.append(remaining_layers // other_stages)
        if any(count % virtual for count in layers_per_stage):
            return f"{virtual} virtual stages do not divide a stage's layers"
        return ""

    def _count_stage_layers(self, layers: int, pipeline: int, rank: int) -> int:
        """Return the number of layers of one pipeline rank.

        Embedding and loss are included if they count as layers.
        """
        if self.first and rank == 0:
            return self.first
        if self.last and rank == pipeline - 1:
            return self.last
        stages = pipeline - (self.first > 0) - (self.last > 0)
        return (layers - self.first - self.last + self.counted_ends) // max(1, stages)


EVEN_SPLIT = StageSplit()


def even_layout(layers: int, stages: int) -> StageSplit:
    """Return a layout that is as even as possible; the stages at both ends have fewer layers."""
    fewest, num_larger = divmod(layers, stages)
    return _layout([fewest + (1 <= stage <= num_larger) for stage in range(stages)])


def front_loaded_layout(layers: int, stages: int, depths: int) -> StageSplit:
    """Return a pipeline layout whose first stages have equally many layers, rounded up.

    The last stages therefore have fewer layers or none. This makes room on the last stage for `depths` layers of
    multi-token prediction and for the loss.
    """
    layers_of_full_stage = ceil(layers / stages)
    layers_per_stage: list[int] = []
    remaining = layers
    for _ in range(stages):
        layers_per_stage.append(min(layers_of_full_stage, remaining))
        remaining -= layers_per_stage[-1]
    return _layout(layers_per_stage, depths)


def _layout(counts: Sequence[int], depths: int = 0) -> StageSplit:
    """Return the layout with these numbers of layers per stage."""
    return StageSplit(layout=f"E{'|'.join('t' * count for count in counts)}{'m' * depths}L")


_REPEATED = re.compile(r"(?:\(([^()*]+)\)|([A-Za-z|]))\*([0-9]{1,3})(?![0-9*])")
"""A group in parentheses or one letter, and its number of repetitions of at most three digits."""


@lru_cache(maxsize=4096)
def _split_layout(layout: str) -> tuple[str, ...]:
    """Return the letters of each stage, with repetitions expanded.

    Commas are dropped. A `*` without a letter and a number is kept, so that `find_problem` refuses the layout.
    """
    text = layout.replace(",", "")
    # Parentheses may be nested. Each pass expands one innermost group or letter.
    while match := _REPEATED.search(text):
        group, letter, times = match.groups()
        repeated = (group or letter) * int(times)
        text = text[: match.start()] + repeated + text[match.end() :]
    return tuple(text.split("|"))


def parse_stage_split(flags: Flags) -> StageSplit:
    """Return the placement in the flags; Megatron ignores these flags without pipeline stages."""
    if flags.integer("--pipeline-model-parallel-size") == 1:
        return EVEN_SPLIT
    return StageSplit(**flags.fields("stages"))


@lru_cache(maxsize=4096)
def choose_stage_split(layers: int, pipeline: int) -> StageSplit | None:
    """Return the even split if the degree divides the layers, else an uneven one; None if neither
    is possible.
    """
    return EVEN_SPLIT if layers % pipeline == 0 else find_uneven_split(layers, pipeline, 1)


@lru_cache(maxsize=4096)
def virtual_degrees(stages: StageSplit, layers: int, pipeline: int) -> tuple[int, ...]:
    """Return all possible numbers of virtual stages per rank with this split, in ascending order.

    The result is empty if Megatron refuses the split for any number.
    """
    max_layers_per_stage = ceil((layers + stages.counted_ends) / pipeline)
    degrees = []
    for degree in range(1, max_layers_per_stage + 1):
        if not stages.find_problem(layers, pipeline, degree):
            degrees.append(degree)
    return tuple(degrees)


def find_uneven_split(layers: int, pipeline: int, virtual: int) -> StageSplit | None:
    """Return a split of the layers over the stages, for a number of layers that the stages do not divide.

    Embedding and loss take about as long as a layer each. The function first tries to count one or both of them as
    layers. If the stages divide no such sum, the last stage, which computes the loss, gets fewer layers than the
    others. The result is None if that is not possible either.
    """
    for split in (
        StageSplit(embedding=True, loss=True),
        StageSplit(loss=True),
        StageSplit(embedding=True),
    ):
        if split.find_problem(layers, pipeline, virtual):
            continue
        layers_of_first = sum(split.layers_per_chunk(layers, pipeline, 1, rank=0))
        layers_of_last = sum(split.layers_per_chunk(layers, pipeline, 1, rank=pipeline - 1))
        if layers_of_first and layers_of_last:
            return split
    # All stages but the last have a multiple of the virtual stages, rounded up.
    layers_per_chunk = ceil(layers / (pipeline * virtual))
    layers_per_other_stage = layers_per_chunk * virtual
    shorter = StageSplit(last=layers - (pipeline - 1) * layers_per_other_stage)
    if shorter.last > 0 and not shorter.find_problem(layers, pipeline, virtual):
        return shorter
    return None
