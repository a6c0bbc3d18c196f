"""List the changed lines of a Megatron checkout that are nearest to the source of a wrong tensor.

A verdict names the function that computes the wrong tensor. The mistake may be in a function that it calls, in a file
that the author of a fork has edited. So changed lines are ordered by how directly the blamed file imports their file.
Within the blamed file, they are ordered by their distance from the blamed line.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_patches.context import run_git

MAX_CHANGES = 3
"""Most changes that are listed for one wrong tensor."""
MAX_IMPORT_DEPTH = 2
"""Most imports between the blamed file and a changed file. Changes farther away are left out."""
_UPSTREAM_BRANCHES = ("upstream/main", "origin/main", "upstream/master", "origin/master")
"""Branches that a fork may have started from."""
_RELEASE_TAGS = "core_v*"
"""Pattern of the tags of Megatron's releases."""
_HUNK = re.compile(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True)
class ChangedLines:
    """Consecutive lines of a file that differ from the commit that a fork started from."""

    file: str
    """File, relative to the checkout."""
    first_line: int
    num_lines: int
    """Number of changed or added lines. 0 means that lines were only deleted, below `first_line`."""

    def __str__(self) -> str:
        """Return file and first line, as in `megatron/core/models/common/embeddings/rope_utils.py:63`."""
        return f"{self.file}:{max(1, self.first_line)}"

    def distance(self, line: int) -> int:
        """Return the number of lines between these lines and `line`; 0 if they contain it."""
        last_line = self.first_line + max(0, self.num_lines - 1)
        return max(0, self.first_line - line, line - last_line)


def list_nearest_changes(
    checkout: Path, source: str | None, base: str = ""
) -> tuple[ChangedLines, ...]:
    """Return the changes of a checkout that are nearest to a source line, the nearest first.

    Uncommitted changes count, and so do the commits of a fork. These are the commits since the upstream branch, or
    since the release that the fork started from. The upstream branch is `GITHUB_BASE_REF` in a pull request's
    workflow, `upstream/main` or `origin/main`. The blamed line itself need not be changed.

    Args:
        checkout: Root of the Megatron checkout.
        source: File and line, such as `megatron/core/transformer/mlp.py:120`, relative to the checkout. None returns
            the first changes in the order of their files.
        base: Commit that the checkout is compared with; empty finds the commit that a fork started from.

    Returns:
        At most three changes. The result is empty if the folder is no git checkout, or if nothing is changed. It is
        also empty if the source's file imports no changed file, directly or through one other file.
    """
    changes = _list_changes(checkout, base or _find_fork_point(checkout))
    if not changes:
        return ()
    if source is None:
        return tuple(changes[:MAX_CHANGES])
    blamed_file, _, blamed_line = source.rpartition(":")
    depth_by_file = _measure_import_depths(checkout, blamed_file)
    reachable = [change for change in changes if change.file in depth_by_file]

    def measure_distance(change: ChangedLines) -> tuple[int, str, int]:
        depth = depth_by_file[change.file]
        # Lines are near or far only within the blamed file. In another file, the first change comes first.
        lines = change.distance(int(blamed_line)) if depth == 0 else change.first_line
        return depth, change.file, lines

    return tuple(sorted(reachable, key=measure_distance)[:MAX_CHANGES])


def _list_changes(checkout: Path, base: str) -> list[ChangedLines]:
    """Return all lines of Python files below `megatron/` that differ from a commit.

    The result is empty if the folder is no git checkout.
    """
    diff = run_git(
        checkout, "diff", "--unified=0", "--no-color", "--no-ext-diff", base, "--", "megatron/*.py"
    )
    changes: list[ChangedLines] = []
    file = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            # A deleted file has the name /dev/null, which no import leads to.
            file = line.removeprefix("+++ ").removeprefix("b/")
        hunk = _HUNK.match(line)
        if hunk is not None:
            first_line, num_lines = int(hunk[1]), int(hunk[2] or 1)
            changes.append(ChangedLines(file, first_line, num_lines))
    return changes


def _find_fork_point(checkout: Path) -> str:
    """Return the commit that a checkout's changes are compared with; `HEAD` if the clone knows no upstream commit.

    It is the latest ancestor of `HEAD` that is on an upstream branch or tagged as a release. Releases count because a
    fork may start from a release, and a release may have commits that are not on the main branch.
    """
    branches = list(_UPSTREAM_BRANCHES)
    pull_request_branch = os.environ.get("GITHUB_BASE_REF")
    if pull_request_branch:
        branches.insert(0, f"origin/{pull_request_branch}")
    candidates = [run_git(checkout, "merge-base", "HEAD", branch).strip() for branch in branches]
    release = ("describe", "--tags", "--abbrev=0", "--match", _RELEASE_TAGS)
    candidates.append(run_git(checkout, *release, "HEAD").strip())
    commits_since: dict[str, int] = {}
    for candidate in candidates:
        if candidate:
            commits = run_git(checkout, "rev-list", "--count", f"{candidate}..HEAD")
            commits_since[candidate] = int(commits or 0)
    return min(commits_since, key=commits_since.__getitem__, default="HEAD")


def _measure_import_depths(checkout: Path, file: str) -> dict[str, int]:
    """Return how many imports lead from a file to each file of Megatron: 0 for the file itself, 1 for its imports.

    Files that more than `MAX_IMPORT_DEPTH` imports lead to are left out.
    """
    depth_by_file = {file: 0}
    files_at_depth = [file]
    for depth in range(1, MAX_IMPORT_DEPTH + 1):
        imported_files = [
            imported
            for importer in files_at_depth
            for imported in _list_imported_files(checkout, importer)
        ]
        files_at_depth = [
            imported for imported in dict.fromkeys(imported_files) if imported not in depth_by_file
        ]
        depth_by_file |= dict.fromkeys(files_at_depth, depth)
    return depth_by_file


def _list_imported_files(checkout: Path, file: str) -> Iterator[str]:
    """Yield the files of Megatron that a file imports; none if the file cannot be read or parsed."""
    try:
        tree = ast.parse((checkout / file).read_bytes())
    except (OSError, SyntaxError):
        return
    package = Path(file).parent.parts
    for node in ast.walk(tree):
        for module in _list_imported_modules(node, package):
            if not module.startswith("megatron"):
                continue
            path = module.replace(".", "/")
            for candidate in (f"{path}.py", f"{path}/__init__.py"):
                if (checkout / candidate).is_file():
                    yield candidate


def _list_imported_modules(node: ast.AST, package: tuple[str, ...]) -> list[str]:
    """Return the absolute names of the modules that a node may import; empty if the node is no import.

    Args:
        node: Any node of a file's syntax tree.
        package: Names of the packages that contain the file, outermost first.
    """
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    parents: tuple[str, ...] = ()
    if node.level:  # One dot is the package itself, and each further dot is one package up.
        parents = package[: len(package) - node.level + 1]
    module = ".".join((*parents, node.module)) if node.module else ".".join(parents)
    # `from package import name` imports the module `package.name`, if there is one.
    return [module, *(f"{module}.{alias.name}" for alias in node.names)]
