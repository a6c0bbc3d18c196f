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

REPRODUCED = [finding for finding in list_findings() if finding.verdict is FindingStatus.REPRODUCED]


def test_thread_ends_with_a_number() -> None:
    """YAML takes what follows ` #` for a comment where the text is not quoted."""
    for finding in list_findings():
        assert re.search(r"^$|#\d+(?: A\d+)?$", finding.thread), finding.id


def test_an_entry_has_only_known_fields() -> None:
    known = {field.name for field in fields(Finding)}
    assert all(known.issuperset(entry) for entry in read_yaml(FOLDER / "findings.yaml"))


def test_every_finding_is_judged_for_every_version_and_has_a_name_of_its_own() -> None:
    names = [finding.id for finding in list_findings()]
    assert len(set(names)) == len(names)
    for finding in list_findings():
        assert sorted((*finding.present, *finding.absent)) == sorted(VERSIONS), finding.id
        assert "" not in (finding.title, finding.why), finding.id


@pytest.mark.parametrize("finding", REPRODUCED, ids=lambda finding: finding.id)
def test_reproduced_finding_names_a_layout_a_module_and_a_patch_that_exist(
    finding: Finding,
) -> None:
    for strategy in finding.strategies:
        assert (
            parse_target(f"train-{strategy}-{finding.model}-{finding.devices}cpu").flags is not None
        )
    locations = {finding.stage, finding.module, finding.kind}
    assert locations == {"", None} if finding.fails else not {"", None} & locations
    assert not finding.behind or finding.behind in {other.id for other in REPRODUCED}
    measured = list(asdict(finding.effect).values())[1:] if finding.effect else []
    assert all(isinstance(value, float) for value in measured)  # YAML takes 1e-07 for text.
    assert read_patch_file(str(finding.patch)).path == f"docs/upstream/{finding.patch.name}"


def test_every_patch_and_report_is_of_a_finding() -> None:
    # Of one that was mended meanwhile the patch may be there: the matrix applies it in earlier versions.
    files = (
        (finding.patch, finding.report, finding.witness and FOLDER / finding.witness)
        for finding in list_findings()
    )
    of_findings = {path for some in files for path in some if path}
    of_findings = {path for path in of_findings if path.is_file()}
    of_fixes = {FOLDER / finding.patch for finding in fixes() if finding.patch}
    there = {*FOLDER.glob("*.py"), *FOLDER.glob("*.md")} - {FOLDER / "README.md"}
    assert there == of_findings | of_fixes


def test_command_of_a_hidden_finding_applies_the_patch_of_the_finding_that_hides_it() -> None:
    finding = next(finding for finding in REPRODUCED if finding.behind)
    patch = f"docs/upstream/{finding.behind.replace('-', '_')}.py"
    assert finding.command(finding.shown_with).endswith(f'PATCH_FILE="{patch}"')


def test_hanging_finding_is_shown_with_the_witness_that_ends_it() -> None:
    (finding,) = (finding for finding in REPRODUCED if finding.witness)
    assert finding.fails in (FOLDER / finding.witness).read_text()
    assert finding.command(finding.shown_with).endswith(
        f'PATCH_FILE="docs/upstream/{finding.witness}"'
    )


@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_every_finding_differs_as_described_and_holds_with_its_patch(
    sample_prefix: Path, tmp_path: Path
) -> None:
    printed = bench(sample_prefix, tmp_path, "live")
    assert printed.count("| yes |") == 2 * sum(not finding.checkout for finding in REPRODUCED)


@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_findings_of_resumed_runs_are_seen_where_they_are_judged_present(
    sample_prefix: Path, tmp_path: Path
) -> None:
    findings = [finding for finding in list_findings() if finding.resumed]
    names = [finding.id for finding in findings]
    printed = bench(sample_prefix, tmp_path, "present", "--only", *names)
    present = sum(finding.verdict is FindingStatus.REPRODUCED for finding in findings)
    assert present >= 1
    assert printed.count("| seen |") == present, printed
    assert printed.count("| not seen |") == len(findings) - present >= 1, printed
