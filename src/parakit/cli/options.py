"""Parse the values of a command, from make's variables or from the options of a command line.

The result is a `Namespace` with one attribute per variable, in lower case, and `texts`, the values as written.
"""

from __future__ import annotations

import difflib
import re
import shlex
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from inspect import signature
from typing import Any, NoReturn

from parakit.cli.commands import BENCH, BENCH_NAME, BENCHES, COMMANDS, REMOVED, Command
from parakit.config.setting import SettingError, parse_setting, parse_settings, refuse_renamed
from parakit.config.settings import ARGS, OPTIONS, RENAMED, SETTINGS, SWITCH, Setting
from parakit.config.spelling import rewrite_variables

_VARIABLE = re.compile(r"((?:\\.|\S)+?)=(?:\\.|\S)*")
_NEVER_IGNORED = {
    "NNODES": "leave NNODES= out.",
    "LAUNCHER": "leave LAUNCHER= to train-… targets and sweep ('scontrol requeue' continues a job).",
}
"""Remedies by variables that a command refuses if it does not use them, even if only the environment sets them.

Other variables of the environment are ignored by commands that do not use them.
"""


def refuse_strange_target_name(name: str) -> None:
    """Refuse a target's name that make or a shell could misread, for example as an option.

    Raises:
        SettingError: The name has a strange character, or begins with a dash, as an option does.
    """
    strange = re.sub(r"[\w.+-]", "", name)
    if strange:
        raise SettingError(
            f"There is no target {name!r}: a target's name has letters, digits, '.', '_', '+' and '-' "
            f"alone, and no {strange[0]!r}; 'make help-all' lists the targets."
        )
    if name.startswith("-"):
        raise SettingError(
            f"'{name}' is an option and no target; 'make help-all' lists the targets."
        )


def find_command(name: str) -> Command | None:
    """Return the first command whose name or pattern matches a target's name; None without one."""
    return next((command for command in COMMANDS if fnmatchcase(name, command.name)), None)


def find_bench(name: str) -> Command:
    """Return the command of a bench; for an empty name, the command that runs the default benches.

    Raises:
        SettingError: There is no bench of this name.
    """
    if not name:
        return BENCH
    benches = {bench.name.partition("=")[2]: bench for bench in BENCHES}
    if name not in benches:
        near = difflib.get_close_matches(name, benches, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise SettingError(f"There is no bench '{name}'; {hint}There are {', '.join(benches)}.")
    bench = benches[name]
    return bench._replace(variables=(BENCH_NAME, *bench.variables))


def refuse_removed(name: str, program: str) -> None:
    """Refuse a command that existed only in an older version.

    Args:
        name: The name of the command.
        program: `make` or `parakit`; the replacement is written for this program.

    Raises:
        SettingError: It was removed; the sentence names the command to use instead.
    """
    if name not in REMOVED:
        return
    replacement = REMOVED[name]
    command = find_command(replacement.partition(" ")[0])
    assert command is not None
    if program == "parakit":
        replacement = rewrite_as_options(replacement, command)
    raise SettingError(f"'{program} {name}' was removed; use '{program} {replacement}'.")


def parse_makeflags(makeflags: str) -> list[str]:
    """Return the names of the variables on make's command line, which make passes on in MAKEFLAGS."""
    return [match[1] for match in _VARIABLE.finditer(makeflags.partition("-- ")[2])]


def parse_make_variables(
    name: str,
    command: Command,
    environment: Mapping[str, str],
    arguments: Sequence[str] = (),
    written: Sequence[str] = (),
) -> Namespace:
    """Return a target's values from make's variables in the environment.

    Args:
        name: The target.
        command: The target's command.
        environment: The environment of the process.
        arguments: Further arguments of a launch script.
        written: Names of variables that the user wrote down, besides those in MAKEFLAGS.

    Raises:
        SettingError: A variable is not used, not of its kind, or missing.
    """
    names = (*parse_makeflags(environment.get("MAKEFLAGS", "")), *written)
    refuse_unused_variables(names, name, command)
    _refuse_renamed_variables(environment, command)
    used = {setting.name for setting in command.variables if not setting.make_equivalent}
    for variable, remedy in _NEVER_IGNORED.items():
        is_default = environment.get(variable, "") in ("", "1", "torchrun")
        if variable not in used and not is_default:
            raise SettingError(f"'{name}' runs on this machine alone; {remedy}")
    texts = {key: environment[key] for key in used if environment.get(key)}
    if ARGS.name not in used:
        arguments = (*arguments, *parse_setting(ARGS, environment.get(ARGS.name, "")))
    if _has_own_parser(command):
        parsed = Namespace(arguments=arguments, program=f"make {name}")
    else:
        parsed = build_parser(command, name).parse_args(arguments)
    if command.in_clone:
        texts = import_function(command.in_clone)(texts)
    return _complete_values(parsed, command, texts, typed=f"make {name}", variable_format="{}=")


def _refuse_renamed_variables(environment: Mapping[str, str], command: Command) -> None:
    """Refuse variables of the environment whose meaning for a command now has another name.

    Raises:
        SettingError: A variable is set by its old name, or make has another variable for this option.
    """
    options_only = {setting.name for setting in command.variables if setting.make_equivalent}
    used = {setting.name for setting in command.variables if not setting.make_equivalent}
    old_names = {old for old, new in RENAMED.items() if new in used}
    for name in sorted(old_names | options_only):
        if environment.get(name):
            refuse_renamed(name)


def parse_arguments(command: Command, arguments: Sequence[str], program: str) -> Namespace:
    """Return the values of a command from the options of a command line, without make.

    Args:
        command: The command.
        arguments: Its options and arguments.
        program: The program and the command as the user wrote them, for messages.

    Raises:
        SettingError: An option is unknown, not of its kind, or missing.
    """
    if _has_own_parser(command):
        return Namespace(arguments=arguments, program=program)
    known = {option_name(setting) for setting in command.variables}
    for argument in arguments:
        option = argument.partition("=")[0]
        if option.startswith("--") and option not in known:
            refuse_renamed(option[2:].upper().replace("-", "_"))
    parsed = build_parser(command, program).parse_args(arguments)
    command = command._replace(example=rewrite_as_options(command.example, command))
    return _complete_values(parsed, command, texts={}, typed=program, variable_format="--{}")


def build_parser(command: Command, program: str) -> ArgumentParser:
    """Return the parser of a command: an option per variable, and the options that its handler adds.

    A handler's module adds options by a function `<handler>_arguments`. A handler that parses its arguments itself
    brings its parser as the module's `command_line`.
    """
    module, _, name = command.handler.partition(":")
    handlers = import_module(module)
    if _has_own_parser(command):
        own_parser: ArgumentParser = handlers.command_line(program)
        return own_parser
    parser = _Parser(prog=program, description=rewrite_as_options(command.help, command))
    for setting in command.variables:
        if setting.name != ARGS.name:
            help_text = rewrite_as_options(setting.meaning, command)
            _add_option(parser, setting._replace(help=help_text))
    add_arguments = getattr(handlers, f"{name}_arguments", None)
    if add_arguments:
        add_arguments(parser)
    return parser


def _has_own_parser(command: Command) -> bool:
    """Return True if the command's handler parses its arguments itself: it requires `arguments`."""
    parameter = signature(import_function(command.handler)).parameters.get("arguments")
    return parameter is not None and parameter.default is parameter.empty


def option_name(setting: Setting) -> str:
    """Return a variable's option, such as `--global-batch`. A name without dashes is a positional argument."""
    return setting.option or f"--{setting.name.lower().replace('_', '-')}"


def rewrite_as_options(text: str, command: Command) -> str:
    """Return a text in which make variables are written as options: `GPUS=2` becomes `--gpus 2`.

    Words in double quotes, and names that are no variables, are not changed.
    """

    return rewrite_variables(text, (*command.variables, *SETTINGS, *OPTIONS), _write_option)


def _write_option(setting: Setting, value: str | None) -> str:
    """Return a variable and its value as a command line has them; None gives the option alone.

    For ARGS= and for a positional argument, this is the value alone. A switch has no value.
    """
    option, value = option_name(setting), value or ""
    if setting.name == ARGS.name:
        return value.strip('"') or "further options"
    if not option.startswith("-"):
        return value.strip('"') or option
    if not value or setting.kind == SWITCH:
        return option
    return f"{option} {value}"


def rewrite_for_parakit(text: str, command: Command | None) -> str:
    """Return a message for a user of `parakit` who wrote options: it names `parakit` commands and their options.

    Commands whose recipe the Makefile has stay commands of make.

    Args:
        text: A message that names commands and variables of make.
        command: The command that the user called; None if there is no such command.
    """

    def to_parakit(match: re.Match[str]) -> str:
        if match[1] in ("help", "help-all"):
            return "parakit --help"
        named = find_command(match[1].replace("<", "").replace(">", ""))
        return f"parakit {match[1]}" if named is not None and named.handler else match[0]

    return rewrite_as_options(_MAKE_COMMAND.sub(to_parakit, text), command or Command("", "", ""))


_MAKE_COMMAND = re.compile(r"\bmake ([1-9a-z][\w<>…%-]*)")


def rewrite_as_variables(arguments: Sequence[str], command: Command) -> list[str]:
    """Return the arguments of a command line as make variables, in the form `NAME=value`.

    Arguments that have this form already are not changed. If the command takes ARGS=, options that are no make
    variables are put into ARGS=.

    Raises:
        SettingError: An option is unknown, or has no value.
    """
    settings = {option_name(setting): setting for setting in command.variables}
    positional = [setting for option, setting in settings.items() if not option.startswith("-")]
    takes_args = any(setting.name == ARGS.name for setting in command.variables)
    waiting = list(arguments)
    assignments: list[str] = []
    passed_on: list[str] = []  # The arguments in ARGS=.
    while waiting:
        argument = waiting.pop(0)
        name, equals_sign, value = argument.partition("=")
        setting = settings.get(name)
        if setting is not None:
            if not equals_sign:
                value = _take_value(name, setting, waiting)
            if setting.make_equivalent:
                passed_on += _write_argument(name, setting, value)
            else:
                assignments.append(f"{setting.name}={value}")
            continue
        is_option = name.startswith("--")
        # An argument after an option of ARGS= may be the value of that option.
        may_be_value = bool(passed_on) and not equals_sign
        is_positional = not equals_sign and not name.startswith("-")
        if takes_args and (is_option or may_be_value):
            passed_on.append(argument)
        elif is_option:
            raise SettingError(_describe_unknown_option(name, settings))
        elif positional and is_positional:
            assignments.append(f"{positional.pop(0).name}={argument}")
        else:
            assignments.append(argument)
    if passed_on:
        assignments.append(f"{ARGS.name}={shlex.join(passed_on)}")
    return assignments


def _write_argument(option: str, setting: Setting, value: str) -> list[str]:
    """Return an option that is no make variable as an argument in ARGS=; a switch that is off gives none."""
    if setting.kind != SWITCH:
        return [f"{option}={value}"]
    return [option] if value == "1" else []


_COMMON_ABBREVIATIONS = {
    "--gbs": "--global-batch",
    "--bs": "--global-batch",
    "--batch": "--global-batch",
    "--batch-size": "--global-batch",
    "--global-batch-size": "--global-batch",
    "--mbs": "--micro-batch",
    "--micro-batch-size": "--micro-batch",
    "--sequence-length": "--seq",
    "--seq-length": "--seq",
    "--precision": "--dtype",
    "--devices": "--gpus",
    "--num-gpus": "--gpus",
    "--world-size": "--gpus",
}
"""Options of the kit by the names that Megatron and other trainers give them, which have too few letters in common."""


def _describe_unknown_option(name: str, options: Iterable[str]) -> str:
    """Return the sentence that refuses an option. It suggests the most similar option, if there is one."""
    known = list(options)
    suggestion = _COMMON_ABBREVIATIONS.get(name)
    if suggestion not in known:
        similar = difflib.get_close_matches(name, known, n=1)
        suggestion = similar[0] if similar else None
    hint = f"did you mean {suggestion}?" if suggestion else "see --help."
    return f"There is no option {name}; {hint}"


def _take_value(name: str, setting: Setting, waiting: list[str]) -> str:
    """Remove an option's value from the front of `waiting`, and return it.

    The value of a switch is 1, unless the next argument is 0 or 1.

    Raises:
        SettingError: No argument follows.
    """
    if setting.kind == SWITCH:
        has_value = bool(waiting) and waiting[0] in ("0", "1")
        return waiting.pop(0) if has_value else "1"
    if not waiting:
        raise SettingError(f"{name} has no value; see --help.")
    return waiting.pop(0)


def refuse_unused_variables(names: Iterable[str], target: str, command: Command) -> None:
    """Refuse variables that a target would ignore. Variables of other programs are not refused.

    Raises:
        SettingError: A variable is unknown, or the target does not use it; the sentence suggests a similar one.
    """
    known = {setting.name for setting in SETTINGS}
    used = {setting.name for setting in command.variables if not setting.make_equivalent}
    used.add(ARGS.name)
    for name in names:
        refuse_renamed(name)
        is_known = name in known
        if name in used or (not is_known and _is_of_other_program(name)):
            continue
        # Users also write variables in lower case, as in iters=5.
        option = _COMMON_ABBREVIATIONS.get(f"--{name.lower().replace('_', '-')}", "")
        suggestion = option.removeprefix("--").replace("-", "_").upper()
        similar = [suggestion] if suggestion in (used or known) else []
        similar += difflib.get_close_matches(name.upper(), sorted(used or known), n=1, cutoff=0.5)
        hint = "'make help-all' lists the variables of each target."
        if similar:
            hint = f"did you mean {similar[0]}=?"
        if not is_known:
            raise SettingError(f"There is no variable {name}; {hint}")
        raise SettingError(f"'make {target}' does not use {name}=; {hint}")


def _is_of_other_program(name: str) -> bool:
    """Return True if a variable's name matches one of `_OTHER_PROGRAMS`."""
    return any(fnmatchcase(name, pattern) for pattern in _OTHER_PROGRAMS)


_OTHER_PROGRAMS = (
    *("HF_*", "NCCL_*", "GLOO_*", "TP_SOCKET_*", "UCX_*", "FI_*", "CUDA_*", "NVIDIA_*", "TORCH*"),
    *(
        "OMP_*",
        "MKL_*",
        "DS_*",
        "WANDB_*",
        "SLURM_CONF",
        "SLURM_CLUSTERS",
        "SBATCH_*",
        "PYTHON*",
        "PIP_*",
        "UV_*",
    ),
    *("http*", "HTTP*", "no_proxy", "NO_PROXY", "NO_COLOR", "COLUMNS", "SHELL", "KIT_*"),
    *("MEGATRON_URL", "VENV_PYTHON", "MEGATRON_LM_CHECKOUTS"),
)
"""Patterns of variables that other programs or the Makefile read."""


class _Parser(ArgumentParser):
    """A parser that raises a SettingError with one sentence instead of ending the process."""

    def parse_args(  # type: ignore[override]  # argparse declares two overloads; this is their union.
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> Namespace:
        """Parse a command line, and refuse its first unknown option with the name of the most similar option."""
        parsed, unknown_arguments = self.parse_known_args(args, namespace)
        for argument in unknown_arguments:
            name = argument.partition("=")[0]
            if name.startswith("--"):
                raise SettingError(_describe_unknown_option(name, self._option_string_actions))
        if unknown_arguments:
            self.error(f"unrecognized arguments: {' '.join(unknown_arguments)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        raise SettingError(f"{message[:1].upper()}{message[1:]}; see --help.")


def _add_option(parser: ArgumentParser, setting: Setting) -> None:
    """Add a variable to a parser: as a positional argument, a switch, or an option with a value."""
    name, option = setting.name.lower(), option_name(setting)
    if not option.startswith("-"):
        is_list = setting.kind == "words"
        parser.add_argument(
            name,
            type=str if is_list else _make_reader(setting),
            help=setting.meaning,
            nargs="*" if is_list else "?",
            metavar=option,
        )
    elif setting.kind == SWITCH:
        parser.add_argument(
            option, dest=name, action="store_true", default=None, help=setting.meaning
        )
    else:
        parser.add_argument(option, dest=name, type=_make_reader(setting), help=setting.meaning)


def _make_reader(setting: Setting) -> Callable[[str], Any]:
    """Return the function with which argparse reads a value. It refuses the same values that make refuses."""

    def read_value(text: str) -> Any:
        try:
            return parse_setting(setting, text)
        except SettingError as error:
            reason = str(error).rstrip(".").removeprefix(f"{setting.name}=")
            raise ArgumentTypeError(reason) from None

    return read_value


def _complete_values(
    parsed: Namespace,
    command: Command,
    texts: Mapping[str, str],
    *,
    typed: str,
    variable_format: str,
) -> Namespace:
    """Set all variables that the options did not set, in place, and return the namespace.

    Args:
        parsed: The values of the options; it is changed.
        command: The command.
        texts: Values of make variables as written, by name.
        typed: The program and the command as the user wrote them, for an error message.
        variable_format: How an error message writes a variable: `{}=` as in make, or `--{}` as an option.

    Raises:
        SettingError: A required variable is missing, or a value is not of its kind.
    """
    parsed.texts = texts
    for key, value in parse_settings(command.variables, texts).items():
        is_unset = getattr(parsed, key, None) in (None, [], ())
        if is_unset:
            setattr(parsed, key, value)
    for requirement in command.required:
        alternatives = requirement.split("|")
        has_value = any(getattr(parsed, name.lower(), None) for name in alternatives)
        if not has_value:
            shown_name = _show_variable(alternatives[0], command, variable_format)
            raise SettingError(f"{shown_name} is required, for example: {typed} {command.example}")
    return parsed


def _show_variable(name: str, command: Command, variable_format: str) -> str:
    """Return a variable's name in the form of make or of a command line."""
    setting = next(setting for setting in command.variables if setting.name == name)
    if setting.make_equivalent:
        return option_name(setting)
    is_make_form = variable_format.endswith("=")
    return variable_format.format(name if is_make_form else name.lower())


def import_function(path: str) -> Callable[..., Any]:
    """Import and return the function that `module:function` names."""
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function
