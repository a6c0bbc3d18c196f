"""`make bench NAME=planners ARGS="--calculon checkout --simumax checkout"`: comparison with other planners on
the published rows that they can express.

Each planner runs in a separate process, with the interpreter of the checkout's `.venv` if it exists, and gets the
same input as ours. Other planners use their own rates: Calculon's system for A100, and SimuMax's for B200, which was
measured on the machine of SimuMax's rows. Our predictions exclude the row's source from the fit. For times of
SimuMax they are also computed with `CALIBRATE=` of a product that SimuMax has measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console

from parakit.config.recompute import Recompute
from parakit.config.strategy import Sharding
from parakit.formatting.table import Column, Table, markdown_table
from parakit.formatting.units import GIB, percent
from parakit.planner.calibration import calibrate_from_text
from parakit.planner.readings.reading_to_spec import MeasuredRun
from parakit.planner.readings.residual import (
    Residual,
    compute_residual,
    compute_residuals,
    use_constants_without_source,
)
from parakit.planner.readings.summary import MEMORY, metric_kind
from parakit.planner.readings.table import MEASUREMENTS_FILE, read_measurements
from tests.planner.papers import paper_runs

SIMUMAX_ROWS = Path(__file__).with_name("simumax_b200.csv")
"""What SimuMax publishes of its own B200 (`docs/b200/b200_release_v1.2_summary.json` of 4dcaae5), with
the flags of its scripts."""

_SYSTEM = "configs/system/b200_bf16_ceperm.json"
_PRODUCT = (4096, 57344, 8192)
"""Rows, columns and inner dimension of the largest product of a layer in SimuMax' rows."""

_DIRECT = ("step_time_s", "tokens_per_s_per_gpu")
_TESTS = "NVIDIA/Megatron-LM golden values"
_SHARDINGS = (Sharding.NONE, Sharding.ZERO1)

Job = dict[str, Any]
Answer = tuple[float, float]
"""Seconds per iteration and bytes of the peak rank."""


def calculon_job(row: MeasuredRun) -> Job | None:
    """Return the job for Calculon, or None if Calculon cannot express the run.

    Calculon has no gated MLP, experts, CP, fused attention, dropout, vocabulary or uneven stages. For the remaining
    rows its systems have only the A100, and its types only 16 bits.
    """
    spec, cluster = row.spec, row.cluster
    shape, split = spec.shape, spec.parallelism
    plain = not (shape.gated or shape.experts or shape.blocks or shape.latent or shape.mtp_layers)
    if (
        not plain
        or spec.fp8_recipe
        or spec.fused_attention
        or split.context > 1
        or shape.query_groups != shape.heads
        or cluster.device.key != "a100"
        or split.sharding not in _SHARDINGS
        or shape.layers % (split.pipeline * split.virtual_stages)
        or (again := _recomputed(spec.recompute)) is None
    ):
        return None
    spans = (1, split.tensor, split.tensor * split.pipeline, split.world_size)
    inside = [int(last > cluster.per_node) for last in spans[1:]]
    sums = "rs_ag" if split.sequence_parallel else "ar"
    return {
        "system": "systems/a100_80g.json",
        "node": [cluster.per_node, cluster.inter.bytes_per_second / 1e9],
        "app": {
            "hidden": shape.hidden,
            "feedforward": shape.ffn_hidden,
            "seq_size": shape.seq_length,
            "attn_heads": shape.heads,
            "attn_size": shape.head_width,
            "num_blocks": shape.layers,
        },
        "exe": {
            "num_procs": split.world_size,
            "tensor_par": split.tensor,
            "pipeline_par": split.pipeline,
            "data_par": split.data,
            **dict(
                zip(("tensor_par_net", "pipeline_par_net", "data_par_net"), inside, strict=True)
            ),
            "batch_size": spec.batch.global_batch_size,
            "microbatch_size": spec.batch.micro_batch_size,
            "datatype": "float16",
            "fused_activation": True,
            "attention_type": "multihead",
            "activation_recompute": again,
            "pipeline_interleaving": split.virtual_stages,
            "optimizer_sharding": bool(split.sharding) and split.data > 1,
            "tensor_par_comm_type": "p2p_rs_ag" if cluster.execution.scatter_gather else sums,
            "tensor_par_overlap": "none",
            "seq_par_ag_redo": False,
            "data_par_overlap": cluster.execution.overlap_gradients and split.data > 1,
            "weight_offload": False,
            "activations_offload": False,
            "optimizer_offload": False,
            "training": True,
        },
    }


def _recomputed(recompute: Recompute) -> str | None:
    if recompute == Recompute.SELECTIVE:
        return "attn_only"
    return {"none": "none", "full": "full"}.get(str(recompute))


def simumax_job(row: MeasuredRun) -> Job | None:
    """Return the job for SimuMax, or None if SimuMax cannot express the run: its B200 has rates in bf16 only, its
    context parallelism is all-to-all."""
    spec, cluster = row.spec, row.cluster
    shape, split, latent = spec.shape, spec.parallelism, spec.shape.latent
    if (
        cluster.device.key != "b200"
        or spec.dtype != "bf16"
        or spec.fp8_recipe
        or shape.blocks
        or shape.mtp_layers
        or spec.recompute != Recompute.NONE
        or spec.offload
        or split.sharding not in _SHARDINGS
        or (split.context > 1 and spec.cp_comm_type != "a2a")
        or shape.layers % (split.pipeline * split.virtual_stages)
    ):
        return None
    strategy = {
        "seq_len": shape.seq_length,
        "micro_batch_size": spec.batch.micro_batch_size,
        "micro_batch_num": spec.microbatches,
        "world_size": split.world_size,
        "tp_size": split.tensor,
        "cp_size": split.context,
        "pp_size": split.pipeline,
        "ep_size": split.expert,
        "etp_size": split.effective_expert_tensor if shape.experts else 1,
        "interleaving_size": split.virtual_stages,
        "enable_sequence_parallel": split.sequence_parallel,
        "zero_state": int(bool(split.sharding)),
        "use_fp32_accum_grad": spec.state_types.gradients != "bf16",
        "grad_reduce_in_bf16": spec.state_types.gradients == "bf16",
        "enable_recompute": False,
        "pp_comm_async": split.virtual_stages > 1,
        "enable_straggler_model": False,
        "te_version": "2.11.0",
        "cross_entropy_loss_fusion": spec.fused_loss,
        "dispatch_probs": bool(shape.experts),
    }
    model = {
        "hidden_size": shape.hidden,
        "head_num": shape.heads,
        "kv_head_num": shape.query_groups,
        "head_size": shape.head_width,
        "intermediate_size": shape.ffn_hidden,
        "layer_num": shape.layers,
        "vocab_size": shape.vocabulary,
        "use_swiglu": shape.gated,
    }
    if shape.experts:
        model |= {
            "expert_num": shape.experts,
            "topk": shape.experts_per_token,
            "moe_ffn_hidden_size": shape.expert_ffn_hidden,
            "moe_shared_expert_intermediate_size": shape.shared_expert_ffn or None,
            "dense_layers": len(shape.dense_layers),
        }
    if latent:
        model |= {
            "attention_type": "mla",
            "v_head_dim": latent.value_width,
            "qk_head_dim": latent.head_width,
            "qk_pos_emb_head_dim": latent.rotary_width,
            "q_lora_rank": latent.query_rank,
            "kv_lora_rank": latent.key_value_rank,
        }
    return {"system": _SYSTEM, "strategy": strategy, "model": model}


_CALCULON = """
import json, logging, sys
from calculon import System
from calculon.llm import Llm
def ask(job):
    system = json.load(open(job["system"]))
    size, rate = job["node"]
    system["networks"][0]["size"], system["networks"][1]["bandwidth"] = size, rate
    planned = Llm(Llm.Application(job["app"]), logging.getLogger())
    machine = System(system)
    planned.compile(machine, Llm.Execution.from_json(job["exe"]))
    planned.run(machine)
    return planned.get_total_time(), planned.get_mem_tier1_cap_req()
"""

_SIMUMAX = """
import json, sys
from simumax.core.config import ModelConfig, StrategyConfig, SystemConfig
from simumax.core.perf_llm import PerfLLM
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
def ask(job):
    planned = PerfLLM()
    planned.configure(
        strategy_config=StrategyConfig.init_from_dict(job["strategy"]),
        model_config=ModelConfig.init_from_dict(job["model"]),
        system_config=SystemConfig.init_from_config_file(job["system"]),
    )
    planned.run_estimate()
    number, unit = planned.analysis_cost().data["duration_time_per_iter"].split()
    peaks = planned.get_pp_stage_peak_mem(planned.analysis_mem(), "peak_mem", toG=True)
    return float(number) * UNITS[unit], max(map(float, peaks.values())) * 2**30
"""

_ANSWERS = """
import contextlib, io
found = []
for job in json.load(sys.stdin):
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            found.append(ask(job))
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
print("ANSWERS " + json.dumps(found))
"""


@dataclass(frozen=True)
class Planner:
    """A planner of another project."""

    name: str
    asks: str
    """Program text that defines `ask(job)`."""
    job: Any
    """`calculon_job` or `simumax_job`."""


CALCULON = Planner("Calculon", _CALCULON, calculon_job)
SIMUMAX = Planner("SimuMax", _SIMUMAX, simumax_job)


def asked(planner: Planner, checkout: Path, jobs: Sequence[Job]) -> list[Answer | str]:
    """Return a planner's answer to each job, or the text of its refusal.

    Raises:
        ValueError: The planner does not run from this checkout.
    """
    interpreter = checkout / ".venv" / "bin" / "python"
    done = subprocess.run(
        [
            str(interpreter) if interpreter.exists() else sys.executable,
            "-c",
            planner.asks + _ANSWERS,
        ],
        cwd=checkout,
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        check=False,
    )
    answer_lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    if not answer_lines:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise ValueError(
            f"{planner.name} does not run in {checkout}: {last[0]}; make an environment for it there, "
            f"{interpreter}."
        )
    return [
        answer if isinstance(answer, str) else (answer[0], answer[1])
        for answer in json.loads(answer_lines[-1][8:])
    ]


@dataclass(frozen=True)
class Compared:
    """Rows of a kind with the predictions of another planner and of ours."""

    planner: str
    kind: str
    rows: int
    errors: tuple[float, ...]
    ours: tuple[float, ...]
    """Errors of our planner on the same rows."""
    calibrated: tuple[float, ...] = ()
    """Errors of our planner with a rate that was measured on their machine."""


def stated_rate(checkout: Path) -> str:
    """Return the text of `CALIBRATE=` for a product that SimuMax has measured."""
    rows, columns, inner = _PRODUCT
    products = json.loads((checkout / _SYSTEM).read_text())["accelerator"]["op"]["matmul"]
    named = f"b=1, m={rows}, k={inner}, n={columns}, layout=TN, accumulate=False, out_dtype=bf16"
    rate = products["tflops"] * products["accurate_efficient_factor"][named]
    return f"{rate:.0f} TFLOP/s on {rows}x{columns}x{inner}"


def published(readings: Path | None = None) -> list[Residual]:
    """Return times and peaks of published runs with our predictions, which are made without their sources.

    Megatron's functional tests are left out, because the host sets their steps.

    Args:
        readings: File of measurements. None means the published ones, with SimuMax' own and those of arXiv:2205.05198.
    """
    files = (readings,) if readings else (MEASUREMENTS_FILE, SIMUMAX_ROWS)
    rows = chain.from_iterable(read_measurements(path)[0] for path in files)
    wanted = [
        row
        for row in rows
        if row.source != _TESTS
        and (row.metric in _DIRECT or metric_kind(row.metric) == MEMORY)
        and row.metric != "memory_allocated_bytes"
    ]
    papers = [
        compute_residual(use_constants_without_source(run, run.measurement.source))
        for run in (() if readings else paper_runs())
    ]
    return [*compute_residuals(wanted).predicted, *papers]


def compared(rows: Iterable[Residual], checkouts: Mapping[Planner, Path]) -> Iterator[Compared]:
    """Yield the comparison for each planner and each kind of rows that it can express."""
    rows = list(rows)
    kinds: dict[str, int] = defaultdict(int)
    for row in rows:
        kinds[_kind(row)] += 1
    for planner, checkout in checkouts.items():
        jobs = [(row, job) for row in rows if (job := planner.job(row.measured_run))]
        answers = asked(planner, checkout, [job for _, job in jobs])
        errors_by_kind: dict[str, list[tuple[float, Residual]]] = defaultdict(list)
        for (row, _), answer in zip(jobs, answers, strict=True):
            if not isinstance(answer, str):
                errors_by_kind[_kind(row)].append((_error(row, answer), row))
        for kind, errors in sorted(errors_by_kind.items()):
            their_errors, our_rows = zip(*errors, strict=True)
            is_timed = planner is SIMUMAX and all(row.seconds for row in our_rows)
            rate = stated_rate(checkout) if is_timed else ""
            again = tuple(_with_rate(row, rate).error for row in our_rows if rate)
            ours = tuple(row.error for row in our_rows)
            yield Compared(planner.name, kind, kinds[kind], their_errors, ours, again)


def _with_rate(row: Residual, text: str) -> Residual:
    measured_run, cluster = row.measured_run, row.measured_run.cluster
    calibration = calibrate_from_text(text, cluster, measured_run.spec.dtype)
    return compute_residual(
        replace(measured_run, cluster=replace(cluster, calibration=calibration))
    )


def _kind(row: Residual) -> str:
    architecture = "mixtures" if row.measured_run.spec.shape.experts else "dense"
    return f"{metric_kind(row.measurement.metric)}, {row.measurement.source.partition(' (')[0]}, {architecture}"


def _error(row: Residual, answer: Answer) -> float:
    """Return the error like `Residual.error`. Memory of another planner is allocated memory."""
    seconds, held = answer
    if metric_kind(row.measurement.metric) != MEMORY:
        return seconds / row.published_seconds - 1
    unit = (
        GIB
        if row.measurement.metric.endswith("gib")
        else 1e9
        if row.measurement.metric.endswith("gb")
        else 1
    )
    return held / unit / row.measurement.value - 1


def table(comparisons: Iterable[Compared]) -> Table[Compared]:
    """Return a table with a line per planner and kind: number of rows, and the errors of both planners."""
    columns = (
        Column[Compared]("kind of row", lambda line: line.kind, right=False),
        Column[Compared]("planner", lambda line: line.planner, right=False),
        Column[Compared]("rows it expresses", lambda line: f"{len(line.errors)} of {line.rows}"),
        Column[Compared]("its mean |error|", lambda line: mean(map(abs, line.errors)), percent),
        Column[Compared]("its median |error|", lambda line: median(map(abs, line.errors)), percent),
        Column[Compared]("ours, mean", lambda line: mean(map(abs, line.ours)), percent),
        Column[Compared]("ours, median", lambda line: median(map(abs, line.ours)), percent),
        Column[Compared](
            "ours, CALIBRATE=",
            lambda line: mean(map(abs, line.calibrated)) if line.calibrated else None,
            percent,
        ),
    )
    return Table(columns, tuple(comparisons))


def main(
    console: Console,
    calculon: Path | None = None,
    simumax: Path | None = None,
    readings: Path | None = None,
) -> int:
    """Print the table for a file of measurements, or for the published ones; return 0."""
    checkouts = {
        planner: path for planner, path in ((CALCULON, calculon), (SIMUMAX, simumax)) if path
    }
    console.print(markdown_table(table(compared(published(readings), checkouts))), soft_wrap=True)
    return 0
