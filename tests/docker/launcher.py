"""`python -m parakit WORDS…` with the pairs of another `versions.env` than the kit's.

`python -m tests.docker.launcher VERSIONS_ENV WORDS…`
"""

import sys
from pathlib import Path

from parakit.cli.dispatch import run_target
from parakit.cluster.container import image

if __name__ == "__main__":
    image.VERSIONS = Path(sys.argv[1])
    sys.exit(run_target(sys.argv[2], sys.argv[3:]))
