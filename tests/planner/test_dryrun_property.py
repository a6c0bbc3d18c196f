"""Closed forms against Megatron's own code, over random legal configurations."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from parakit.planner.dryrun.job import DryRunner
from tests.planner.dry_runs import Case, cases, run_case

_LIMITS = settings(
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def assert_equal(runner: DryRunner, case: Case) -> None:
    comparison = run_case(runner, case)
    assert comparison.report.parameters == comparison.parameters
    assert [str(difference) for difference in comparison.differences] == []
    assert comparison.report.communication.wire_bytes == comparison.wire_bytes
    assert comparison.report.in_flight == comparison.in_flight


@settings(_LIMITS, max_examples=3)
@given(cases())
def test_parameters_and_every_call_equal_the_closed_form(dry_runner: DryRunner, case: Case) -> None:
    assert_equal(dry_runner, case)


@pytest.mark.slow
@settings(_LIMITS, max_examples=60)
@given(cases())
def test_sixty_random_configurations_equal_the_closed_form(
    dry_runner: DryRunner, case: Case
) -> None:
    assert_equal(dry_runner, case)
