"""The last lines of a run that ended well: what came out, and what to do next."""

from __future__ import annotations

from pathlib import Path

from tools.launch.compose import Launch
from tools.launch.job import make_command
from tools.report.analyse.configurations import pooled
from tools.report.analyse.parity import loss_curve, resumption_sentence
from tools.report.read.runs import Run, load_folder
from tools.spec import settings
from tools.spec.run import Backend, DeviceKind
from tools.text.units import number

_OF_VERIFY = {
    each.name
    for each in (
        settings.MODEL,
        settings.DATA,
        settings.DTYPE,
        settings.EXTRA,
        settings.MEGATRON_LM,
        settings.PATCH_FILE,
    )
}
"""What a verification must be given as well to train the same."""


def result_lines(launch: Launch, folder: Path) -> list[str]:
    """The report's figures of it, whether what it trained twice agrees, and the next commands."""
    run = load_folder(folder)
    lines = [_figures(run), resumption_sentence(run), _next(launch, run)]
    return [line for line in lines if line]


def _figures(run: Run) -> str:
    losses, time = loss_curve(run), pooled([run])
    said = []
    if losses:
        last = max(losses)
        said.append(f"Loss {losses[last]:.6f} in iteration {last}")
    if time:
        said.append(f"{number(time.median)} ms/iteration (median of {time.count})")
        tokens = (run.global_batch_size or 0) * (run.seq_length or 0)
        said.append(f"{tokens * 1000 / time.median:,.0f} tokens/s")
    return ", ".join(said) + "." if said else ""


def _next(launch: Launch, run: Run) -> str:
    job = launch.job
    report = make_command("report", {"RUNS": job.variables.get(settings.RUNS.name, "")})
    said = f"Next: '{report}' compares it with the other runs there"
    on_cpu_ranks = job.device is DeviceKind.CPU and job.options.backend is Backend.MEGATRON
    # A resumed run is given all of its recorded flags, which is no line to type.
    if run.is_baseline or not on_cpu_ranks or launch.resume_point:
        return f"{said}."
    given = {name: text for name, text in job.variables.items() if name in _OF_VERIFY}
    return f"{said}; '{make_command(f'verify-{job.name}', given)}' checks every tensor of it."
