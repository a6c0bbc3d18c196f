"""Megatron's own bugs: each is judged for every version, and can be shown and cured (slow)."""

import re
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from parakit.config.files import read_yaml
from parakit.launch.job import parse_target
from parakit.launch.options import read_patch_file
from parakit.verify.findings import FOLDER, VERSIONS, Finding, FindingStatus, list_findings
from tests.verify.benched import bench
from tests.verify.history import fixes

REPRODUCED = [one for one in list_findings() if one.verdict is FindingStatus.REPRODUCED]


def test_thread_ends_with_a_number() -> None:
    """YAML takes what follows ` #` for a comment where the text is not quoted."""
    for one in list_findings():
        assert re.search(r"^$|#\d+(?: A\d+)?$", one.thread), one.id


def test_an_entry_has_only_known_fields() -> None:
    known = {each.name for each in fields(Finding)}
    assert all(known.issuperset(entry) for entry in read_yaml(FOLDER / "findings.yaml"))


def test_every_finding_is_judged_for_every_version_and_has_a_name_of_its_own() -> None:
    names = [one.id for one in list_findings()]
    assert len(set(names)) == len(names)
    for one in list_findings():
        assert sorted((*one.present, *one.absent)) == sorted(VERSIONS), one.id
        assert "" not in (one.title, one.why), one.id


@pytest.mark.parametrize("one", REPRODUCED, ids=lambda one: one.id)
def test_reproduced_finding_names_a_layout_a_module_and_a_patch_that_exist(one: Finding) -> None:
    for strategy in one.strategies:
        assert parse_target(f"train-{strategy}-{one.model}-{one.devices}cpu").flags is not None
    place = {one.stage, one.module, one.kind}
    assert place == {"", None} if one.fails else not {"", None} & place
    assert not one.behind or one.behind in {other.id for other in REPRODUCED}
    measured = list(asdict(one.effect).values())[1:] if one.effect else []
    assert all(isinstance(value, float) for value in measured)  # YAML takes 1e-07 for text.
    assert read_patch_file(str(one.patch)).path == f"docs/upstream/{one.patch.name}"


def test_every_patch_and_report_is_of_a_finding() -> None:
    # Of one that was mended meanwhile the patch may be there: the matrix applies it in earlier versions.
    files = (
        (one.patch, one.report, one.witness and FOLDER / one.witness) for one in list_findings()
    )
    of_findings = {path for some in files for path in some if path}
    of_findings = {path for path in of_findings if path.is_file()}
    of_fixes = {FOLDER / one.patch for one in fixes() if one.patch}
    there = {*FOLDER.glob("*.py"), *FOLDER.glob("*.md")} - {FOLDER / "README.md"}
    assert there == of_findings | of_fixes


def test_command_of_a_hidden_finding_applies_the_patch_of_the_finding_that_hides_it() -> None:
    one = next(one for one in REPRODUCED if one.behind)
    patch = f"docs/upstream/{one.behind.replace('-', '_')}.py"
    assert one.command(one.shown_with).endswith(f'PATCH_FILE="{patch}"')


def test_hanging_finding_is_shown_with_the_witness_that_ends_it() -> None:
    (one,) = (one for one in REPRODUCED if one.witness)
    assert one.fails in (FOLDER / one.witness).read_text()
    assert one.command(one.shown_with).endswith(f'PATCH_FILE="docs/upstream/{one.witness}"')


@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_every_finding_differs_as_described_and_holds_with_its_patch(
    sample_prefix: Path, tmp_path: Path
) -> None:
    printed = bench(sample_prefix, tmp_path, "live")
    assert printed.count("| yes |") == 2 * sum(not one.checkout for one in REPRODUCED)
