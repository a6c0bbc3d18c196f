from pathlib import Path

from tools.launch.parity import disagreements

HEADER = "run,status,strategy,parity"


def rows(folder: Path, *lines: str) -> list[str]:
    results = folder / "results.csv"
    results.write_text("\n".join((HEADER, *lines)) + "\n")
    return disagreements(results)


def test_reference_and_held_agree(tmp_path: Path) -> None:
    assert rows(tmp_path, "a,ok,baseline,reference", "b,ok,tp2,held") == []


def test_what_broke_cannot_be_compared_or_is_not_known_does_not_pass(tmp_path: Path) -> None:
    found = rows(
        tmp_path,
        "a,ok,baseline,reference",
        "b,ok,tp2,broken@11",
        "c,ok,pp2,not comparable",
        "d,crashed,cp2,",
    )
    assert found == [
        "Parity of tp2: broken@11 (status ok).",
        "Parity of pp2: not comparable (status ok).",
        "Parity of cp2: not known (status crashed).",
    ]
