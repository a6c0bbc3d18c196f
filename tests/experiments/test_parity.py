from parakit.experiments.commands import describe_broken_parity
from parakit.reporting.analyse.entry import Entry
from tests.reporting.factory import report_row


def rows(*verdicts: tuple[str, str, str]) -> list[Entry]:
    return [
        report_row(strategy, status=status, parity=parity) for strategy, status, parity in verdicts
    ]


def test_reference_and_kept_parity_agree() -> None:
    assert (
        describe_broken_parity(rows(("baseline", "ok", "reference"), ("tp2", "ok", "held"))) == []
    )


def test_broken_incomparable_and_unknown_parity_fail() -> None:
    sentences = describe_broken_parity(
        rows(
            ("baseline", "ok", "reference"),
            ("tp2", "ok", "broken@11"),
            ("pp2", "ok", "not comparable"),
            ("cp2", "crashed", ""),
        )
    )
    assert sentences == [
        "Parity of tp2: broken@11 (status ok).",
        "Parity of pp2: not comparable (status ok).",
        "Parity of cp2: not known (status crashed).",
    ]
