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

from parakit.config.flags import Flags, format_fields_as_flags

LAYOUT_FLAG = "--pipeline-model-parallel-layout"


@dataclass(frozen=True)
class StageSplit:
    """The placement of layers on pipeline stages; the default is an even split."""

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
        return max(1, len(_stages_of_layout(self.layout)) // pipeline)

    @property
    def mtp_layers_in_layout(self) -> int:
        """Layers of multi-token prediction in the layout."""
        return sum(stage.count("m") for stage in _stages_of_layout(self.layout))

    def layers_per_chunk(
        self, layers: int, pipeline: int, virtual: int, rank: int
    ) -> tuple[int, ...]:
        """Return the number of transformer layers in each virtual stage (chunk) of a pipeline rank.

        Numbers are rounded down if a degree does not divide the layers.

        Args:
            layers: Layers of the model.
            pipeline: Number of pipeline ranks.
            virtual: Virtual stages per rank.
            rank: Pipeline rank.
        """
        # A search of strategies asks for the even split far more often than for any other.
        if self is EVEN_SPLIT:
            return (layers // pipeline // virtual,) * virtual
        if self.layout:
            # A layout lists all virtual stages: first the first one of each rank. `t` is a layer.
            stages_of_rank = _stages_of_layout(self.layout)[rank::pipeline]
            return tuple(stage.count("t") for stage in stages_of_rank)
        layers_per_chunk = self._count_stage_layers(layers, pipeline, rank) // virtual
        chunks = [layers_per_chunk] * virtual
        # Embedding and loss are counted as a layer each, but hold no transformer layer.
        if self.embedding and rank == 0:
            chunks[0] -= 1
        if self.loss and rank == pipeline - 1:
            chunks[-1] -= 1
        return tuple(chunks)

    def find_problem(self, layers: int, pipeline: int, virtual: int) -> str:
        """Return why Megatron refuses to place `layers` layers in this way; empty if it accepts."""
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

    def _layout_problem(self, layers: int, num_stages: int) -> str:
        """Return why Megatron refuses the layout for this number of stages; empty if it accepts."""
        stages = _stages_of_layout(self.layout)
        text = "".join(stages)
        wrong = {
            "a layout excludes other ways to lay layers": self.first
            or self.last
            or self.counted_ends,
            "it is not E, layers t, depths m of multi-token prediction and L": not re.fullmatch(
                "Et*m*L", text
            ),
            f"it has {len(stages)} stages": len(stages) != num_stages,
            f"it has {text.count('t')} layers": text.count("t") != layers,
            "depths are planned on the last stage alone": any("m" in s for s in stages[:-1]),
            # A stage of its own may have the embedding, and one the loss.
            "they do not fill the stages": not all("t" in stage for stage in stages[1:-1]),
        }
        return next((reason for reason, applies in wrong.items() if applies), "")

    def _own_stages_problem(self, layers: int, pipeline: int, virtual: int) -> str:
        """Return why Megatron refuses a stated number of layers on the first or last pipeline rank.

        The other ranks share the remaining layers evenly. The result is empty if Megatron accepts.
        """
        remaining_layers, stages = layers - self.first - self.last, pipeline - (self.first > 0)
        stages -= self.last > 0
        if stages < 0 or remaining_layers < 0 or (remaining_layers == 0) != (stages == 0):
            return f"{remaining_layers} layers are left for {max(0, stages)} other stages"
        if stages and remaining_layers % stages:
            return f"the {remaining_layers} layers left do not divide over {stages} other stages"
        end_stages = [count for count in (self.first, self.last) if count]
        if any(
            count % virtual
            for count in (*end_stages, *([remaining_layers // stages] if stages else []))
        ):
            return f"{virtual} virtual stages do not divide a stage's layers"
        return ""

    def _count_stage_layers(self, layers: int, pipeline: int, rank: int) -> int:
        """Return the number of layers on one pipeline rank, over all its virtual stages.

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
    """Return a layout in which the first stages have equally many layers, and the last stages the rest.

    The last stages may have none. So the last stage has room for `depths` layers of multi-token
    prediction and for the loss.
    """
    full_count = -(-layers // stages)
    return _layout(
        [min(full_count, max(0, layers - stage * full_count)) for stage in range(stages)], depths
    )


def _layout(counts: Sequence[int], depths: int = 0) -> StageSplit:
    """Return the layout with these numbers of layers per stage."""
    return StageSplit(layout=f"E{'|'.join('t' * count for count in counts)}{'m' * depths}L")


_REPEATED = re.compile(r"(?:\(([^()*]+)\)|([A-Za-z|]))\*([0-9]{1,3})(?![0-9*])")
"""A group in parentheses or one letter, and its number of repetitions of at most three digits."""


@lru_cache(maxsize=4096)
def _stages_of_layout(layout: str) -> tuple[str, ...]:
    """Parse a pipeline layout of Megatron, such as `Et*3|t*4|tL`, into the letters of each stage: `Ettt`, `tttt`, `tL`.

    Commas are dropped. A `*` without something to repeat stays in the result, so that
    `find_problem` refuses the layout.
    """
    text = layout.replace(",", "")
    while match := _REPEATED.search(text):
        repeated = (match[1] or match[2]) * int(match[3])
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
    """Return the numbers of virtual stages per rank that are possible with this split."""
    max_degree = -(-(layers + stages.counted_ends) // pipeline)
    return tuple(
        degree
        for degree in range(1, max_degree + 1)
        if not stages.find_problem(layers, pipeline, degree)
    )


def find_uneven_split(layers: int, pipeline: int, virtual: int) -> StageSplit | None:
    """Return a split for degrees that do not divide the layers; None if there is none.

    Embedding and loss count as layers if the sum is divisible, because each takes about as long as
    a layer. Otherwise the last stage, which computes the loss, gets fewer layers than the others.
    """
    for counted in (
        StageSplit(embedding=True, loss=True),
        StageSplit(loss=True),
        StageSplit(embedding=True),
    ):
        ends = (counted.layers_per_chunk(layers, pipeline, 1, rank) for rank in (0, pipeline - 1))
        if not counted.find_problem(layers, pipeline, virtual) and all(map(sum, ends)):
            return counted
    other_layers = -(-layers // (pipeline * virtual)) * virtual
    shorter = StageSplit(last=layers - (pipeline - 1) * other_layers)
    if shorter.last > 0 and not shorter.find_problem(layers, pipeline, virtual):
        return shorter
    return None
