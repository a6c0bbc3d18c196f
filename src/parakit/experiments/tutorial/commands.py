"""Commands of the tutorial: one run by its id, a chapter on GPUs or CPU ranks, and a chapter predicted."""

from __future__ import annotations

from argparse import Namespace

from rich.console import Console

from parakit.config.errors import LaunchError
from parakit.experiments.engine import run_experiment
from parakit.experiments.tutorial.experiment import load_chapter
from parakit.experiments.tutorial.predict import predict_chapter
from parakit.experiments.tutorial.results import OUTPUT
from parakit.experiments.tutorial.rows import find_row
from parakit.launch import Options, start_job

NAME = "tutorial"


def is_tutorial(name: str) -> bool:
    """Return True if the name of an experiment is the tutorial or a chapter of it, such as `tutorial-pp`."""
    return name == NAME or name.startswith(f"{NAME}-")


def train_row(target: str, options: Options, console: Console) -> int:
    """Train the run of the tutorial that a target names by its id; return the exit code.

    Raises:
        LaunchError: The tutorial has no such run, or it cannot run here; nothing was written.
    """
    return start_job(find_row(target).make_job(options), console)


def run_tutorial(name: str, arguments: Namespace, options: Options, console: Console) -> int:
    """Train a chapter of the tutorial, or predict it with GPU=; return the exit code.

    Args:
        name: `tutorial` or a chapter's name such as `tutorial-pp`.
        arguments: Arguments that only some commands have: CHAPTER=, DEVICES=, MODEL=, GPU=,
            CALIBRATE= and JSON=.
        options: The caller's make variables.
        console: Shows progress and tables.

    Raises:
        LaunchError: There is no such chapter, CHAPTER= contradicts the name, or a run cannot work here.
    """
    chapter_in_name = name.removeprefix(NAME).removeprefix("-") or None
    chapter = getattr(arguments, "chapter", None) or chapter_in_name
    if chapter_in_name not in (None, chapter):
        raise LaunchError(f"NAME={name} and CHAPTER={chapter} are two chapters; leave one out.")
    if getattr(arguments, "gpu", None):
        return predict_chapter(arguments, chapter)
    if getattr(arguments, "calibrate", None):
        raise LaunchError("CALIBRATE= applies only to predictions; add GPU=h100.")
    devices = getattr(arguments, "devices", None)
    model = getattr(arguments, "model", None)
    return run_experiment(load_chapter(chapter, options, devices, model), OUTPUT, console)
