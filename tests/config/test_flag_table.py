"""The table of flags alone. tests/launch/test_known_flags.py compares it with Megatron's parser."""

import re
from dataclasses import fields

import pytest

from parakit.config.experts import ExpertLoad
from parakit.config.files import ROOT
from parakit.config.flag_table import (
    FLAGS,
    __doc__,
    flags_in_group,
    flags_planned_as,
    flags_with_role,
)
from parakit.config.flags import (
    Flags,
    drop_flags_newer_than,
    format_fields_as_flags,
    unlisted_flags,
)
from parakit.config.model import LatentAttention, LinearAttention, Mamba, ModelShape
from parakit.config.offload import Offload
from parakit.config.recompute import Recompute
from parakit.config.run import RunSpec, StateTypes
from parakit.config.settings import SETTINGS
from parakit.config.stages import StageSplit
from parakit.config.strategy import Batch, Parallelism, PipelineSchedule
from parakit.planner.time.execution import Execution

GROUPS = {
    "run": RunSpec,
    "shape": ModelShape,
    "latent": LatentAttention,
    "mamba": Mamba,
    "linear": LinearAttention,
    "parallelism": Parallelism,
    "batch": Batch,
    "stages": StageSplit,
    "recompute": Recompute,
    "offload": Offload,
    "state_types": StateTypes,
    "expert_load": ExpertLoad,
    "execution": Execution,
}
OF_THE_KIT = (
    *("examples/*/*.args", "examples/*/models/*.args", "src/parakit/launch/runtimes/*.args"),
    *("examples/experiments/*.yaml", "examples/matrix.yaml", "docs/upstream/findings.yaml"),
)


def test_every_line_has_a_known_kind_role_and_planner_treatment() -> None:
    roles = set(re.findall(r"^    (\w+) ", str(__doc__), re.MULTILINE))
    variables = {f"{setting.name}=" for setting in SETTINGS}
    kinds = {"on", "off", "whole", "decimal", "text", "texts", "numbers", "backend"}
    ways = {"counted", "one strategy", "parameters", "neither", ""} | variables
    assert {flag.role for flag in FLAGS.values()} == roles
    assert {flag.kind for flag in FLAGS.values()} <= kinds
    assert {flag.planned for flag in FLAGS.values()} <= ways


def test_the_native_backend_has_every_schedule_of_the_grammar() -> None:
    schedules = [schedule.value for schedule in PipelineSchedule if schedule]
    assert FLAGS["--pipeline-schedule"].native.split("|") == schedules


def test_every_field_of_the_table_exists_in_its_class() -> None:
    assert {flag.group for flag in FLAGS.values()} == {*GROUPS, ""}
    for group, of in GROUPS.items():
        assert {flag.field for flag in flags_in_group(group)} <= {
            field.name for field in fields(of)
        }


def test_flag_is_listed_after_the_flags_that_it_requires() -> None:
    seen = set[str]()
    for flag in FLAGS.values():
        assert seen.issuperset(needed.partition("=")[0] for needed in flag.only_with)
        seen.add(flag.name)


@pytest.mark.parametrize("pattern", OF_THE_KIT)
def test_every_flag_in_files_of_the_kit_is_in_the_table(pattern: str) -> None:
    files = sorted(ROOT.glob(pattern))
    assert files
    lines = [line.partition("#")[0] for file in files for line in file.read_text().splitlines()]
    assert unlisted_flags(re.findall(r"(?<![\w-])--[a-z][\w-]+", "\n".join(lines))) == ()


def test_sets_of_flags_are_queried_from_the_table() -> None:
    assert flags_with_role("start") < flags_with_role("start", "attempt")
    assert "--load" in flags_with_role("start")
    assert "--lr" in flags_planned_as("neither")
    assert not flags_planned_as("counted") & flags_planned_as("parameters")


def test_flags_are_read_and_written_through_their_fields() -> None:
    flags = ("--account-for-loss-in-pipeline-split", "--decoder-last-pipeline-num-layers", "3")
    read = StageSplit(**Flags(flags).fields("stages"))
    assert read == StageSplit(last=3, loss=True)
    assert sorted(format_fields_as_flags(read, "stages")) == sorted(flags)
    assert Flags(()).fields("latent") == {}
    assert Flags(["--multi-latent-attention"]).fields("latent")["key_value_rank"] == 32
    offload = ("--fine-grained-activation-offloading", "--offload-modules", "core_attn", "moe_act")
    assert Flags(offload).fields("offload")["modules"] == ("core_attn", "moe_act")


def test_flag_is_dropped_for_releases_without_it() -> None:
    flags = ("--lr", "1", "--muon-nesterov", "--muon-use-nesterov", "--mine", "2")
    assert drop_flags_newer_than(flags, "0.15.0rc2") == ("--lr", "1", "--mine", "2")
    assert drop_flags_newer_than(flags, "0.17.1") == (
        "--lr",
        "1",
        "--muon-use-nesterov",
        "--mine",
        "2",
    )
    assert drop_flags_newer_than(flags, "0.20.0") == ("--lr", "1", "--muon-nesterov", "--mine", "2")
