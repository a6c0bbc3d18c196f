"""Sets of runs that answer one question: experiments, sweeps, the parity matrix, verifications.

This package decides which jobs an experiment has, which of them were already made, and which tables answer its
question. One runner trains the jobs of all experiments.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.experiments.commands import run_named
    from parakit.experiments.engine import Output, Study, comparison, losses_broke
    from parakit.experiments.matrix.definition import load_matrix
    from parakit.experiments.matrix.page import write_cells_page
    from parakit.experiments.tables import bullets, page, sentence
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "Output",
    "Study",
    "bullets",
    "comparison",
    "load_matrix",
    "losses_broke",
    "page",
    "run_named",
    "sentence",
    "write_cells_page",
]
