"""`python -m parakit WORDS…` with the pairs of another `versions.env` than the kit's.

`python -m tests.docker.launcher VERSIONS_ENV WORDS…`
"""

import os
import re
import sys
from pathlib import Path

from parakit.cli.dispatch import run_target
from parakit.cluster.checks import apptainer
from parakit.cluster.container import image

if __name__ == "__main__":
    image.VERSIONS = Path(sys.argv[1])
    # SIF files of the tests' images lie beside their pairs and not in the kit.
    apptainer._FOLDER = image.VERSIONS.parent
    if os.environ.get("DOCKER_BUILDKIT") == "0":
        # The builder that runs in the engine's own runtime knows no mounts.
        text = re.sub(r"--mount=\S+ \\\n *", "", image.DOCKERFILE.read_text())
        image.DOCKERFILE = image.VERSIONS.with_name("Dockerfile")
        image.DOCKERFILE.write_text(text)
    sys.exit(run_target(sys.argv[2], sys.argv[3:]))
