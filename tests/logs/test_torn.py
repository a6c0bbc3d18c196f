"""Lines that a launcher splits and labels are joined; all other lines stay unchanged."""

from pathlib import Path

import pytest

from parakit.logs.scrape import scrape_log
from parakit.logs.scraped import ScrapedLog
from tests.reporting.factory import iteration_line

ARGUMENTS = {
    "bf16": "True",
    "data_parallel_size": "8",
    "ffn_hidden_size": "5440",
    "hidden_size": "2048",
    "kv_channels": "128",
    "num_layers": "24",
}
MEMORY = (
    "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.5 | max allocated: 2.5 |"
    " reserved: 3.5 | max reserved: 4.5"
)


def torn(line: str, position: int, label: str) -> str:
    return f"{label}{line[:position]}\n{label}{line[position:]}"


def scraped(tmp_path: Path, lines: list[str]) -> ScrapedLog:
    path = tmp_path / "a.log"
    path.write_text("\n".join([*lines, ""]))
    return scrape_log(path)


@pytest.mark.parametrize("label", ["0: ", "  12: ", "[default3]:"])
@pytest.mark.parametrize("position", [6, 17, 25, 49, 50, 51, 52, 53])
def test_argument_is_complete_wherever_its_line_was_split(
    tmp_path: Path, label: str, position: int
) -> None:
    lines = [f"{label}------------------------ arguments ------------------------"]
    for name, value in ARGUMENTS.items():
        line = f"  {name} {'.' * (48 - len(name))} {value}"
        lines.append(torn(line, position, label) if name == "ffn_hidden_size" else label + line)
        lines.append(f"1: noise of another rank about {name}")
    lines.append(f"{label}-------------------- end of arguments ---------------------")
    assert scraped(tmp_path, lines).arguments == ARGUMENTS


@pytest.mark.parametrize("position", range(40, len(MEMORY), 7))
def test_peak_memory_is_complete_wherever_its_line_was_split(tmp_path: Path, position: int) -> None:
    lines = [f"0: {iteration_line(1)}", torn(MEMORY, position, "0: "), f"0: {iteration_line(2)}"]
    log = scraped(tmp_path, lines)
    assert [report.max_allocated_mib for report in log.memory] == [2.5]
    assert [iteration.iteration for iteration in log.iterations] == [1, 2]


@pytest.mark.parametrize("position", range(70, 330, 13))
def test_iteration_is_complete_wherever_its_line_was_split(tmp_path: Path, position: int) -> None:
    whole = [iteration_line(number) for number in range(1, 9)]
    lines = [f"0: {line}" for line in whole]
    lines[4] = torn(whole[4], position, "0: ")
    (expected,) = [
        iteration for iteration in scraped(tmp_path, whole).iterations if iteration.iteration == 5
    ]
    iterations = {
        iteration.iteration: iteration for iteration in scraped(tmp_path, lines).iterations
    }
    assert iterations[5] == expected
    assert list(iterations) == list(range(1, 9))


def test_line_that_only_looks_split_is_unchanged(tmp_path: Path) -> None:
    lines = [
        "0:   ffn_hidden_size ......",
        "0: [2026-01-01] another thing",
        f"0: {iteration_line(1)}",
    ]
    log = scraped(tmp_path, [f"0: {iteration_line(0)}", *lines])
    assert [iteration.iteration for iteration in log.iterations] == [0, 1]
