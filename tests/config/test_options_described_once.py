"""An option of make, the command line and the Python API has one description: its entry in `config`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import types
from argparse import ArgumentParser
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

import parakit
from parakit.cli.commands import BENCHES, COMMANDS, Command
from parakit.cli.options import build_parser, option_name
from parakit.config import settings, variable_groups
from parakit.config.setting import _choose_parser, parse_settings, settings_by_field
from parakit.config.settings import OPTIONS, SETTINGS, Setting
from parakit.launch import Options
from parakit.planner import PlanOptions

PLANNED = {setting.name.lower(): setting for setting in variable_groups.PLAN}
FIELDS = [
    *((Options, name, setting) for name, setting in settings_by_field(Options).items()),
    *((PlanOptions, field.name, PLANNED[field.name]) for field in dataclasses.fields(PlanOptions)),
]


def value_types(setting: Setting) -> set[type]:
    """The types of the values that the variable's kind is parsed to."""
    parser = _choose_parser(setting.kind)
    if isinstance(parser, type):
        return {parser}
    bounds = re.match("a (whole )?number", setting.kind)
    if bounds:
        return {int} if bounds[1] else {float}
    return type_arguments(get_type_hints(getattr(parser, "func", parser))["return"])


def type_arguments(kind: Any) -> set[type]:
    """The types of a union without None; of other types the type itself, without its parameters."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return {get_origin(kind) or kind for kind in kinds} - {type(None)}


@pytest.mark.parametrize(
    ("options", "name", "setting"), FIELDS, ids=lambda value: getattr(value, "name", None)
)
def test_field_of_options_has_the_type_and_default_of_its_variable(
    options: type, name: str, setting: Setting
) -> None:
    stated = type_arguments(get_type_hints(options)[name])
    # A timeout of a test is a fraction of a second.
    assert stated == value_types(setting) or (stated, setting.name) == ({float}, "HANG_TIMEOUT")
    default = getattr(options, name)
    parsed = parse_settings((setting,), {})[setting.name.lower()]
    if parsed is not None:
        assert default == parsed


@pytest.mark.parametrize("options", [Options, PlanOptions])
def test_options_state_no_default_of_a_variable_that_has_one(options: type) -> None:
    variables = {name: setting for kind, name, setting in FIELDS if kind is options}
    (statement,) = ast.parse(inspect.getsource(options)).body
    assert isinstance(statement, ast.ClassDef)
    for line in statement.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            setting = variables.get(line.target.id)
            if setting and setting.default is not None:
                assert isinstance(line.value, ast.Attribute), line.target.id
                assert line.value.attr == "default", line.target.id


def test_variables_of_plan_are_the_fields_of_its_options() -> None:
    assert set(PLANNED) == {field.name for field in dataclasses.fields(PlanOptions)}


@pytest.mark.parametrize("function", [parakit.plan, parakit.estimate])
def test_arguments_of_the_python_api_have_the_names_and_defaults_of_variables(
    function: types.FunctionType,
) -> None:
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            assert parameter.default == PLANNED[name].default, name


def all_commands() -> list[Command]:
    """Commands with a handler in the package. The benches in `tests` parse their arguments themselves."""
    commands = (*COMMANDS, *BENCHES)
    return [command for command in commands if command.handler.startswith("parakit")]


def test_no_command_adds_an_option_that_a_variable_describes() -> None:
    described = {option_name(setting) for setting in (*SETTINGS, *OPTIONS)}
    for command in all_commands():
        known = {option_name(setting) for setting in command.variables}
        parser: ArgumentParser = build_parser(command, command.name)
        for action in parser._actions:
            added = set(action.option_strings) - known
            assert not added & described, (command.name, added & described)


def test_no_help_text_repeats_a_default() -> None:
    variables = {setting for command in all_commands() for setting in command.variables}
    for setting in variables:
        if setting.default not in (None, "", (), False, True):
            assert not re.search(rf"\({re.escape(str(setting.default))}\b", setting.help), setting


def test_variable_is_described_in_config_or_at_its_command_alone() -> None:
    source = Path(parakit.__file__).parent
    writers = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(r"(?<![\w.])Setting\($", path.read_text(), re.M)
        or re.search(r"(?<![\w.])Setting\(\"", path.read_text())
    }
    # launch/options.py describes the variables of W&B's own client, which are none of make.
    assert writers == {"config/settings.py", "launch/options.py"}


def test_default_is_shown_in_the_help_text() -> None:
    assert settings.SEED.meaning.endswith("(1234)")
    assert settings.SEED._replace(default=7).meaning.endswith("(7)")


def test_what_if_reads_variables_as_plan_does() -> None:
    from parakit.planner.one_strategy import apply_what_if

    changed = apply_what_if(PlanOptions(), 'CALIBRATE="700 TFLOP/s on 4k x 4k x 4k" EXTRA="--lr 1"')
    assert changed.calibrate == "700 TFLOP/s on 4k x 4k x 4k"
    assert changed.extra == "--lr 1"
