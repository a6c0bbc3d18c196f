"""Generate the pages of the site that are too large to be committed, from data in the repository.

`python -m parakit.site.generated_pages FOLDER` writes them. `parity-cells.html` has every verified cell of
`docs/parity/`, and `parity-differences.html` has the pairs that did not hold. `residuals.html` has every published
measurement of the planner with its prediction.
"""

from __future__ import annotations

import sys
from pathlib import Path

from parakit.config.files import ROOT
from parakit.experiments import load_matrix, write_cells_page, write_differences_page
from parakit.planner import write_residuals_page


def write_generated_pages(folder: Path) -> tuple[Path, Path, Path]:
    """Write the pages into a folder and return their paths; make the folder if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    stored, matrix = ROOT / "docs", load_matrix()
    cells = write_cells_page(stored=stored, folder=folder, matrix=matrix)
    differences = write_differences_page(stored=stored, folder=folder, matrix=matrix)
    return cells, differences, write_residuals_page(folder)


if __name__ == "__main__":
    write_generated_pages(Path(sys.argv[1]))
