import pytest

from parakit.experiments.tutorial.claims import (
    Claim,
    checks_of,
    evaluate_expression,
    read_claims,
)
from parakit.experiments.tutorial.rows import CHAPTERS, find_row, read_printed_columns


@pytest.mark.parametrize("claim", read_claims(), ids=lambda claim: claim.key)
def test_arithmetic_of_a_claim_gives_its_figures(claim: Claim) -> None:
    for check in checks_of(claim):
        # The file states figures to the last digit that it prints.
        assert check.compute() == pytest.approx(check.value, rel=5e-3, abs=5e-3), check.expression


@pytest.mark.parametrize("claim", read_claims(), ids=lambda claim: claim.key)
def test_a_claim_has_arithmetic_or_a_source_and_existing_rows(claim: Claim) -> None:
    assert claim.chapter in CHAPTERS
    assert claim.checks or claim.source
    for row_id in claim.rows:
        find_row(str(row_id))


def test_the_five_known_claims_and_ten_others_are_there() -> None:
    keys = {claim.key for claim in read_claims()}
    assert {"layers-not-stages", "olmoe", "strong-scaling-macs", "zero-1", "no-stall"} <= keys
    assert len(keys) == len(read_claims()) >= 15


@pytest.mark.parametrize("text", ["ms[446] ** 2", "open('x')", "ms[446].real", "gb[121]"])
def test_other_than_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no number|no figure"):
        evaluate_expression(text)


WRONG_MACS = {"242": 193.27, "244": 96.64, "248": 48.32}


@pytest.mark.parametrize(("key", "printed"), read_printed_columns().items())
def test_printed_column_is_right_or_listed_as_wrong(key: tuple[str, str], printed: str) -> None:
    row_id, column = key
    row = find_row(row_id)
    expected = float(printed.rstrip("%"))
    shape, degree = row.loaded_model.shape, row.parallelism.tensor
    tokens = row.global_batch * row.seq_length
    match column:
        case "giga_mac":
            computed = tokens * shape.hidden * 8 * shape.hidden / degree / 1e9
            if row_id in WRONG_MACS:
                assert computed == pytest.approx(WRONG_MACS[row_id], abs=0.01)
                assert abs(computed - expected) > 20
                return
        case "volume_mega":
            computed = tokens * shape.hidden / 1e6
        case "efficiency":
            first = evaluate_expression(f"ms[{row_id[:2]}1]")
            computed = first / evaluate_expression(f"ms[{row_id}]")
            computed *= 100 if printed.endswith("%") else 1 / degree
        case "ms_per_gb":
            computed = evaluate_expression(f"ms[{row_id}] / gb[{row_id}]")
        case "speedup_over_recompute":
            computed = evaluate_expression(f"ms[300] / ms[{row_id}]")
        case "layers_per_stage":
            computed = shape.layers / row.parallelism.pipeline
        case "micro_batches":
            computed = row.micro_batches
        case "layers_per_substage":
            # The column has what the label should say: see the claim layers-per-substage.
            flag = int(row.flags[row.flags.index("--num-layers-per-virtual-pipeline-stage") + 1])
            layers = shape.layers / row.parallelism.pipeline
            computed = flag if row_id == "438" else layers / flag
        case _:
            raise AssertionError(column)
    digits = len(printed.rstrip("%").partition(".")[2])
    assert computed == pytest.approx(expected, abs=0.501 * 10**-digits)
