"""What a command was given: through make's variables, or as options of a command line."""

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

_VARIABLE = re.compile(r"((?:\\.|\S)+?)=(?:\\.|\S)*")
_NEVER_IGNORED = {
    "NNODES": "leave NNODES= out.",
    "LAUNCHER": "leave LAUNCHER= to train-… targets and sweep ('scontrol requeue' continues a job).",
}
"""Variables that a command which does not use them refuses, also from the environment alone."""


def refuse_strange_target_name(name: str) -> None:
    """Refuse a target's name that make or a shell could take for more than a name.

    Raises:
        SettingError: It has another character, or begins with a dash, as an option does.
    """
    if strange := re.sub(r"[\w.+-]", "", name):
        raise SettingError(
            f"There is no target {name!r}: a target's name has letters, digits, '.', '_', '+' and '-' "
            f"alone, and no {strange[0]!r}; 'make help-all' lists the targets."
        )
    if name.startswith("-"):
        raise SettingError(
            f"'{name}' is an option and no target; 'make help-all' lists the targets."
        )


def find_command(name: str) -> Command | None:
    """The command of a target's name; None if there is none."""
    return next((one for one in COMMANDS if fnmatchcase(name, one.name)), None)


def find_bench(name: str) -> Command:
    """Return the command of a bench; without a name the one that runs those of few minutes.

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
    """Refuse a command of an older version.

    Args:
        name: What was asked for.
        program: `make` or `parakit`, in whose words the replacement is named.

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
    """Names of the variables on make's command line, from the environment's MAKEFLAGS."""
    return [match[1] for match in _VARIABLE.finditer(makeflags.partition("-- ")[2])]


def parse_make_variables(
    name: str,
    command: Command,
    environment: Mapping[str, str],
    words: Sequence[str] = (),
    given_variables: Sequence[str] = (),
) -> Namespace:
    """What make gives to a target: variables that its environment has, and a script's words.

    Raises:
        SettingError: A variable is not used, not of its kind, or missing.
    """
    named = (*parse_makeflags(environment.get("MAKEFLAGS", "")), *given_variables)
    refuse_unused_variables(named, name, command)
    used = {setting.name for setting in command.variables if not setting.make_equivalent}
    in_environment = {old for old, new in RENAMED.items() if new in used}
    in_environment |= {setting.name for setting in command.variables if setting.make_equivalent}
    for old in sorted(in_environment):
        if environment.get(old):
            refuse_renamed(old)
    texts = {key: text for key in used if (text := environment.get(key, ""))}
    if ARGS.name not in used:
        words = (*words, *parse_setting(ARGS, environment.get(ARGS.name, "")))
    for variable, remedy in _NEVER_IGNORED.items():
        if variable not in used and environment.get(variable, "") not in ("", "1", "torchrun"):
            raise SettingError(f"'{name}' runs on this machine alone; {remedy}")
    given = Namespace(arguments=words, program=f"make {name}")
    if not _reads_words(command):
        given = build_parser(command, name).parse_args(words)
    if command.in_clone:
        texts = import_function(command.in_clone)(texts)
    return _completed(given, command, texts, f"make {name}", "{}=")


def parse_arguments(command: Command, words: Sequence[str], program: str) -> Namespace:
    """What a command line gives to a command, without make.

    Raises:
        SettingError: An option is not known, not of its kind, or missing.
    """
    if _reads_words(command):
        return Namespace(arguments=words, program=program)
    known = {option_name(setting) for setting in command.variables}
    for word in words:
        if word.startswith("--") and word.partition("=")[0] not in known:
            refuse_renamed(word[2:].partition("=")[0].upper().replace("-", "_"))
    given = build_parser(command, program).parse_args(words)
    shown = command._replace(example=rewrite_as_options(command.example, command))
    return _completed(given, shown, {}, program, "--{}")


def build_parser(command: Command, program: str) -> ArgumentParser:
    """The command line of a command: an option for each variable, and what its handler adds."""
    module, _, name = command.handler.partition(":")
    handlers = import_module(module)
    if _reads_words(command):
        own: ArgumentParser = handlers.command_line(program)
        return own
    parser = _Parser(prog=program, description=rewrite_as_options(command.help, command))
    for setting in command.variables:
        if setting.name != ARGS.name:
            _add(parser, setting._replace(help=rewrite_as_options(setting.help, command)))
    if hasattr(handlers, f"{name}_arguments"):
        getattr(handlers, f"{name}_arguments")(parser)
    return parser


def _reads_words(command: Command) -> bool:
    """Whether its handler has a command line of its own."""
    parameter = signature(import_function(command.handler)).parameters.get("arguments")
    return parameter is not None and parameter.default is parameter.empty


def option_name(setting: Setting) -> str:
    """`--global-batch`; a name without dashes stands by itself on a command line."""
    return setting.option or f"--{setting.name.lower().replace('_', '-')}"


def rewrite_as_options(text: str, command: Command) -> str:
    """A text in make's words in those of a command line: `GPUS=2` is `--gpus 2`."""

    def option(found: re.Match[str]) -> str:
        known = (*command.variables, *SETTINGS, *OPTIONS)
        setting = next((one for one in known if one.name == found[1]), None)  # None in quotes.
        if setting is None:
            return found[0]
        name, value = option_name(setting), found[2]
        if setting.name == ARGS.name:
            return value.strip('"') or "further options"
        if not name.startswith("-"):
            return value.strip('"') or name
        return f"{name} {value}" if value and setting.kind != SWITCH else name

    return _ASSIGNED.sub(option, text)


_ASSIGNED = re.compile(r'\b([A-Z][A-Z_0-9]*)=("[^"]*"|[^\s"\',;:()]*)|"[^"]*"')


def rewrite_as_variables(words: Sequence[str], command: Command) -> list[str]:
    """A command line as make's variables; one of them may be written so already.

    Raises:
        SettingError: An option is not known, or has no value.
    """
    options = {option_name(setting): setting for setting in command.variables}
    positional = [setting for name, setting in options.items() if not name.startswith("-")]
    passes_on = any(setting.name == ARGS.name for setting in command.variables)
    waiting = list(words)
    made: list[str] = []
    passed: list[str] = []
    while waiting:
        word = waiting.pop(0)
        name, is_assigned, value = word.partition("=")
        if (setting := options.get(name)) is None:
            if passes_on and (word.startswith("--") or (passed and not is_assigned)):
                passed.append(word)
            elif word.startswith("--"):
                near = difflib.get_close_matches(name, options, n=1)
                raise SettingError(
                    f"There is no option {name}; {f'did you mean {near[0]}?' if near else 'see --help.'}"
                )
            elif positional and not is_assigned and not word.startswith("-"):
                made.append(f"{positional.pop(0).name}={word}")
            else:
                made.append(word)
            continue
        if not is_assigned and setting.kind == SWITCH:
            value = waiting.pop(0) if waiting[:1] in (["0"], ["1"]) else "1"
        elif not is_assigned:
            if not waiting:
                raise SettingError(f"{name} has no value; see --help.")
            value = waiting.pop(0)
        if not setting.make_equivalent:
            made.append(f"{setting.name}={value}")
        elif setting.kind != SWITCH:
            passed.append(f"{name}={value}")
        elif value == "1":
            passed.append(name)
    return [*made, f"{ARGS.name}={shlex.join(passed)}"] if passed else made


def refuse_unused_variables(names: Iterable[str], target: str, command: Command) -> None:
    """Refuse variables that a target would ignore.

    Raises:
        SettingError: One that no command knows, with the near name, or that this one does not use.
    """
    known = {setting.name for setting in SETTINGS}
    used = {setting.name for setting in command.variables if not setting.make_equivalent} | {
        ARGS.name
    }
    for name in names:
        refuse_renamed(name)
        others = any(fnmatchcase(name, pattern) for pattern in _OF_OTHER_PROGRAMS)
        if name in used or (others and name not in known):
            continue
        near = difflib.get_close_matches(name, sorted(used or known), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}=?" if near else "'make help-all' names those that it takes."
        if name not in known:
            raise SettingError(f"There is no variable {name}; {hint}")
        raise SettingError(f"'make {target}' does not use {name}=; {hint}")


_OF_OTHER_PROGRAMS = (
    *("HF_*", "NCCL_*", "GLOO_*", "TP_SOCKET_*", "UCX_*", "FI_*", "CUDA_*", "NVIDIA_*", "TORCH*"),
    *("OMP_*", "MKL_*", "DS_*", "WANDB_*", "SLURM_*", "SBATCH_*", "PYTHON*", "PIP_*", "UV_*"),
    *("http*", "HTTP*", "no_proxy", "NO_PROXY", "NO_COLOR", "COLUMNS", "SHELL", "KIT_*"),
    *("MEGATRON_URL", "VENV_PYTHON", "MEGATRON_LM_CHECKOUTS"),
)
"""What other programs read, and the Makefile's own."""


class _Parser(ArgumentParser):
    """Refuses as everything else is refused: by one sentence."""

    def error(self, message: str) -> NoReturn:
        raise SettingError(f"{message[:1].upper()}{message[1:]}; see --help.")


def _add(parser: ArgumentParser, setting: Setting) -> None:
    name, option = setting.name.lower(), option_name(setting)
    if not option.startswith("-"):
        several = setting.kind == "words"
        kind = str if several else _argument(setting)
        place = {"nargs": "*" if several else "?", "metavar": option}
        parser.add_argument(name, type=kind, help=setting.help, **place)  # type: ignore[arg-type]
    elif setting.kind == SWITCH:
        parser.add_argument(option, dest=name, action="store_true", default=None, help=setting.help)
    else:
        parser.add_argument(option, dest=name, type=_argument(setting), help=setting.help)


def _argument(setting: Setting) -> Callable[[str], Any]:
    def reader(text: str) -> Any:
        try:
            return parse_setting(setting, text)
        except SettingError as error:
            said = str(error).rstrip(".")
            raise ArgumentTypeError(said.removeprefix(f"{setting.name}=")) from None

    return reader


def _completed(
    given: Namespace, command: Command, texts: Mapping[str, str], typed: str, shown: str
) -> Namespace:
    """What was given with the values of all other variables; refused where a required one is missing."""
    given.texts = texts
    for key, value in parse_settings(command.variables, texts).items():
        if getattr(given, key, None) in (None, [], ()):
            setattr(given, key, value)
    for name, *others in (names.split("|") for names in command.required):
        if not any(getattr(given, each.lower(), None) for each in (name, *others)):
            shown_name = _shown(name, command, shown)
            raise SettingError(f"{shown_name} is required, for example: {typed} {command.example}")
    return given


def _shown(name: str, command: Command, shown: str) -> str:
    """Return a variable's name as make or a command line has it."""
    setting = next(setting for setting in command.variables if setting.name == name)
    if setting.make_equivalent:
        return option_name(setting)
    return shown.format(name if shown.endswith("=") else name.lower())


def import_function(path: str) -> Callable[..., Any]:
    """The function that `module:function` names."""
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function
