"""Sets of runs that answer one question: experiments, sweeps, the parity matrix, verifications.

This package decides which jobs an experiment has, which of them were already made, and which tables answer its
question. One runner trains the jobs of all experiments.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.experiments.captures import judge_captures
    from parakit.experiments.matrix.definition import load_matrix
    from parakit.experiments.matrix.page import write_cells_page, write_differences_page
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "judge_captures",
    "load_matrix",
    "write_cells_page",
    "write_differences_page",
]
