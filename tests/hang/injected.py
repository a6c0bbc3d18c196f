"""Faults at random calls of real Megatron runs on CPU ranks, and what is said of each.

`python -m tests.hang.injected run FOLDER SEED CASES [SLOTS]` appends a line of JSON a case to
`FOLDER/cases.jsonl` and goes on where it was stopped; `judge FOLDER` says anew what the kept evidence
shows, as a table. A case of two network namespaces needs root and `ip`.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from rich.console import Console

from parakit.artifacts.run import HANG_REASON_PREFIX
from parakit.config.files import ROOT
from parakit.hang.diagnosis import HangDiagnosis
from parakit.hang.dumps import UnreadableDumpError
from parakit.hang.gather import gather_evidence
from parakit.hang.order import find_mismatch
from parakit.hang.verdict import judge_hang
from parakit.launch import execute as execution
from parakit.launch.compose import Launch
from parakit.launch.job import parse_target
from parakit.launch.options import Options, read_patch_file
from parakit.launch.supervise import hang
from parakit.launch.supervise.hang import HangWatch, collect_stacks
from parakit.launch.supervise.warm import WarmMegatron
from parakit.launch.train import compose_job
from parakit.logs.diagnosis import diagnose_log
from tests.small import SMALL, folded

LAYOUTS = (
    *("dp2:2", "tp2:2", "sp2:2", "cp2:2", "pp2:2", "vpp2:2", "ep2:2", "zero1:2"),
    *("tp2dp2:4", "tp2pp2:4", "pp2dp2:4", "cp2dp2:4", "tp4:4", "pp4:4", "ep2pp2:4", "zero1:4"),
    *("tp2dp2-zero1:4", "vpp2dp2:4", "tp2pp2dp2:8", "ep4tp2:8"),
)
STALLS = ("sleep", "loop", "stop", "data", "kill", "raise")
MISMATCHES = ("skip", "twice", "swap", "size", "dtype", "group", "barrier")
KINDS = (*STALLS, *MISMATCHES, "link", "two")
HEALTHY = ("slow", "asked", "ended")
QUIET_SECONDS, SLOW_SECONDS, START_SECONDS = 10, 2.9, 900
EVIDENCE = ("stacks", "run.json", "status.json", "log.txt")


class PatientWatch(HangWatch):
    """Looks once the fault was met: on a busy machine a start takes longer than a hang."""

    def is_hanging(self, log: Path) -> bool:
        if not super().is_hanging(log):
            return False
        is_long = time.time() - log.stat().st_mtime > START_SECONDS
        return is_long or any(log.parent.glob("fired*.json"))


@dataclass(frozen=True)
class Case:
    """What is done to which run."""

    name: str
    layout: str
    kind: str
    fault: str
    delay: float = 0.0

    @property
    def ranks(self) -> int:
        return int(self.layout.partition(":")[2])

    @property
    def target(self) -> str:
        strategy = self.layout.partition(":")[0]
        model = "moe-tiny" if "ep" in strategy else "gpt2-tiny"
        return f"train-{strategy}-{model}-{self.ranks}cpu"


def drawn(seed: int, cases: int, kinds: tuple[str, ...] = KINDS) -> Iterator[Case]:
    """The cases of a seed: every kind equally often, layouts and calls at random."""
    for number in range(cases):
        random_of = random.Random(f"{seed}:{number}")
        kind = kinds[number % len(kinds)]
        several = [layout for layout in LAYOUTS if layout[-1] in "48"]
        layout = random_of.choice(several if kind == "two" else LAYOUTS)
        ranks = int(layout.partition(":")[2])
        victims = random_of.sample(range(ranks), 2)
        has_many = any(name in layout for name in ("tp", "sp", "cp", "ep"))
        call = random_of.randrange(1, 60 if has_many else 12)
        faults = [f"{kind} {victims[0]} {call}"]
        if kind == "two":
            first, second = random_of.sample(STALLS[:3], 2)
            faults = [f"{first} {victims[0]} {call}", f"{second} {victims[1]} 0"]
        yield Case(f"{seed}:{number}", layout, kind, ";".join(faults), random_of.random() * 4)


def small_data(folder: Path) -> Path:
    """The kit's sample in a small vocabulary."""
    prefix = folder / "sample_text_document"
    if not prefix.with_suffix(".bin").exists():
        arguments = ("sample", "--output-prefix", str(folder / "sample"))
        subprocess.run((sys.executable, "-m", "tools.preprocess", *arguments), cwd=ROOT, check=True)
    small = folder / "small"
    small.mkdir(exist_ok=True)
    return folded(prefix, small)


class Bench:
    """Runs cases side by side; all ranks are forked from processes that have imported Megatron."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.data = small_data(self.folder)
        self.results = self.folder / "cases.jsonl"
        # Of this call: a launcher refuses a patch file that changes between it and its ranks.
        self.fault = self.folder / f"torch/fault{os.getpid()}.py"
        self.fault.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "tests/hang/fault.py", self.fault)
        self.warm: list[WarmMegatron] = []
        """One for each case at a time: a launcher takes all its ranks for its own."""

    def launch(self, case: Case, slot: int) -> Launch:
        runs = self.folder / case.name.replace(":", "-")
        shutil.rmtree(runs, ignore_errors=True)
        runs.mkdir()
        options = Options(
            iterations=12,
            micro_batch_size=2,
            global_batch_size=8,
            data=str(self.data),
            runs=runs,
            extra=SMALL,
            ledger=False,
            shared_start=False,
            patch_file=read_patch_file(str(self.fault)),
            hang_timeout_seconds=SLOW_SECONDS if case.kind == "slow" else QUIET_SECONDS,
        )
        launch = compose_job(parse_target(case.target).with_options(options))
        while len(self.warm) <= slot:
            self.warm.append(WarmMegatron(launch.entry.path, launch.environment))
        return replace(launch, warm=self.warm[slot])

    def begin(self, case: Case, slot: int) -> int:
        """Run a case in a process of its own; its id."""
        launch = self.launch(case, slot)
        child = os.fork()
        if child:
            return child
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        status = 1
        try:
            os.environ["WHY_HANG_FAULT"] = case.fault
            hang.STACK_SECONDS = 60.0
            # What does not decide yet is judged again when the tool is better.
            hang.shutil = SimpleNamespace(rmtree=lambda *_, **__: None)  # type: ignore[assignment]
            if case.kind != "slow":
                execution.HangWatch = PatientWatch  # type: ignore[attr-defined]
            if case.kind == "link":
                os.environ["WHY_HANG_LINK"] = linked(case)
            with (launch.job.options.runs / "launcher.txt").open("w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                execution.execute_launch(launch, launch.job.options.runs, Console(), case.name)
            status = 0
        finally:
            os._exit(status)

    def run(self, cases: list[Case], slots: int) -> None:
        done = {row["case"] for row in rows(self.folder) if is_whole(self.folder, row)}
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        todo = [case for case in reversed(cases) if case.name not in done]
        busy: dict[int, tuple[Case, float, int]] = {}
        try:
            while todo or busy:
                while todo and len(busy) < slots:
                    case = todo.pop()
                    slot = min(set(range(slots)) - {entry[2] for entry in busy.values()})
                    busy[self.begin(case, slot)] = (case, time.time(), slot)
                child, _ = os.waitpid(-1, os.WNOHANG)
                if child in busy:
                    case, began, slot = busy.pop(child)
                    used = psutil.Process(self.warm[slot].pid).cpu_times()
                    spent = used.children_user + used.children_system
                    self.record(case, time.time() - began, spent)
                for child, (case, _, _) in busy.items():
                    self.disturb(child, case)
                time.sleep(0.2)
        finally:
            for child in busy:
                os.kill(child, signal.SIGTERM)
            for process in self.warm:
                process.close()

    def disturb(self, child: int, case: Case) -> None:
        """What comes from outside into a healthy run: a request to end, or to say where it is."""
        runs = self.folder / case.name.replace(":", "-")
        asked = runs / "asked"
        logs = [
            path for path in runs.glob("2*/log.txt") if "iteration        3/" in path.read_text()
        ]
        if case.kind not in ("asked", "ended") or asked.exists() or not logs:
            return
        time.sleep(min(case.delay, 1.0))
        asked.touch()
        if case.kind == "ended":
            os.kill(child, signal.SIGTERM)
        else:
            collect_stacks(ranks_of(logs[0]), logs[0].parent / "stacks")

    def record(self, case: Case, seconds: float, spent: float) -> None:
        runs = self.folder / case.name.replace(":", "-")
        row: dict[str, Any] = {"case": case.name, "kind": case.kind, "layout": case.layout}
        row |= {"fault": case.fault, "seconds": round(seconds), "spent": round(spent)}
        for run in runs.glob("2*"):
            fired = [json.loads(path.read_text()) for path in sorted(run.glob("fired*.json"))]
            row |= {"run": str(run.relative_to(self.folder)), "fired": fired}
            for path in run.iterdir():
                if path.name not in EVIDENCE and path.is_dir():
                    shutil.rmtree(path)
        if case.kind == "link":
            unlinked(case)
        with self.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(line_of(scored(self.folder, row)), flush=True)


def linked(case: Case) -> str:
    """Two network namespaces and a pair of interfaces between them; what the ranks are told."""
    prefix, subnet = names_of(case)
    for arguments in (
        f"netns add {prefix}0",
        f"netns add {prefix}1",
        f"link add {prefix}v0 netns {prefix}0 type veth peer name {prefix}v1 netns {prefix}1",
        *(
            f"-n {prefix}{side} addr add {subnet}.{side + 1}/24 dev {prefix}v{side}"
            for side in (0, 1)
        ),
        *(f"-n {prefix}{side} link set {prefix}v{side} up" for side in (0, 1)),
        *(f"-n {prefix}{side} link set lo up" for side in (0, 1)),
    ):
        subprocess.run(("ip", *arguments.split()), check=True)
    return f"{prefix} {subnet}"


def unlinked(case: Case) -> None:
    for side in (0, 1):
        subprocess.run(("ip", "netns", "del", f"{names_of(case)[0]}{side}"), check=False)


def names_of(case: Case) -> tuple[str, str]:
    number = int(case.name.partition(":")[2])
    return f"wh{number}n", f"10.77.{number % 250}"


def ranks_of(log: Path) -> dict[int, psutil.Process]:
    """The ranks that print to a log."""
    process_by_rank = {}
    for process in psutil.process_iter(["name"]):
        name = process.info["name"]
        if name.startswith("rank") and name[4:].isdigit():
            output = Path(f"/proc/{process.pid}/fd/1")
            if output.exists() and output.resolve() == log.resolve():
                process_by_rank[int(name[4:])] = process
    return process_by_rank


def is_whole(folder: Path, row: dict[str, Any]) -> bool:
    """Whether a case met its fault and all its ranks left their calls; others are tried anew."""
    if not row.get("fired"):
        return row["kind"] in HEALTHY
    stacks = folder / row["run"] / "stacks"
    return all(path.with_suffix(".pkl").exists() for path in stacks.glob("rank*.txt"))


def rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "cases.jsonl"
    all_rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return list({row["case"]: row for row in all_rows}.values())


def scored(folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    """A row with what is said of its evidence now, and how good that is."""
    if "run" not in row or not (folder / row["run"] / "status.json").exists():
        return row | {"outcome": "no run"}
    run = folder / row["run"]
    status = json.loads((run / "status.json").read_text())
    is_hang = status["reason"].startswith(HANG_REASON_PREFIX)
    if not is_hang and status["status"] == "crashed":
        ended = diagnose_log(run / "log.txt", 1, False)
        status |= {"reason": ended.reason, "rank": ended.rank}
    row = row | {"status": status["status"], "reason": status["reason"], "named": status["rank"]}
    is_seen = False
    try:
        evidence = gather_evidence([run])
        is_seen = find_mismatch(evidence) is not None
        row |= {"said": HangDiagnosis(judge_hang(evidence), evidence).to_dict()}
    except UnreadableDumpError as error:
        row |= {"said": {"culprits": [], "suspects": [], "sentence": str(error), "kind": None}}
    answer, fired = row["said"], {fault["rank"] for fault in row["fired"]}
    culprits = {status["rank"]} - {None}
    if is_hang or status["rank"] is None or is_seen:
        culprits = set(answer["culprits"])
    if row["kind"] in (*HEALTHY, "pause"):
        return row | {"outcome": "false" if culprits else "nobody"}
    if not fired:
        return row | {"outcome": "not reached", "counts": False}
    if status["status"] == "ok":
        return row | {"outcome": "no hang", "counts": False}
    if row["kind"] == "link":
        is_right = answer["kind"] == "entered and not completed by anybody"
        outcome = "false" if culprits else "exact" if is_right else "undecided"
    elif culprits == fired:
        outcome = "exact"
    else:
        outcome = "false" if culprits - fired else "part" if culprits else "undecided"
    is_judged = row["kind"] != "link" and (is_hang or status["rank"] is None or is_seen)
    module = module_is_right(row) if is_judged else None
    return row | {"outcome": outcome, "is_hang": is_hang, "module": module, "counts": True}


def module_is_right(row: dict[str, Any]) -> bool | None:
    """Return whether the named module is that of a fault, or holds it.

    None, which is not counted, if no fault met a known module, or if no module is named and one of several faults
    met no known module: an answer without a module would be right by default there.
    """
    named = row["said"].get("module") or ""
    # Of two calls in the other order, each is out of place.
    truth = {
        truth_of(part) for fault in row["fired"] for part in (fault, fault.get("held") or fault)
    }
    if truth == {""} or (not named and "" in truth):
        return None
    return named in truth or any(named and module.startswith(f"{named}.") for module in truth)


def truth_of(fired: dict[str, Any]) -> str:
    """The part of the model that a fault met, in the tool's words."""
    module = fired["module"]
    if fired["kind"] in ("data", "raise") and any(
        "forward_step" in frame for frame in fired["frames"]
    ):
        return "data loading"
    inside = {
        ".experts": "mlp.experts",
        ".router": "mlp.router",
        ".mlp": "mlp",
        "core_attention": "self_attention.core_attention",
        "self_attention": "self_attention",
        "embedding": "embedding",
        "output_layer": "output_layer",
    }
    part_name = next((name for part, name in inside.items() if part in module), None)
    return part_name or place_in(fired["frames"])


def place_in(frames: list[str]) -> str:
    outside = {
        "cross_entropy": "loss",
        "loss_func": "loss",
        "p2p_communication": "pipeline exchange",
        "param_and_grad_buffer": "gradient buffer",
        "finalize_model_grads": "gradient buffer",
        "/optimizer/": "optimizer",
        "get_batch": "data loading",
    }
    return next((name for part, name in outside.items() for f in frames if part in f), "")


def line_of(row: dict[str, Any]) -> str:
    truth = ",".join(f"{truth_of(fault)}/{fault['layer']}" for fault in row.get("fired", ()))
    answer = row.get("said", {})
    return (
        f"{row['case']} {row['layout']} [{row['fault']}] {row['outcome']} {row.get('seconds')} s "
        f"module {row.get('module')}: {truth} vs {answer.get('module')} | {answer.get('sentence')} | "
        f"{row.get('status')} {row.get('named')} {str(row.get('reason'))[:160]}"
    )


def table(scored_rows: list[dict[str, Any]], by: str) -> str:
    """A line of Markdown for each kind, or layout."""
    outcomes = ("exact", "part", "undecided", "false", "nobody", "no hang", "not reached", "no run")
    groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in scored_rows:
        groups[row[by]].append(row)
    lines = [f"| {by} | run | {' | '.join(outcomes)} | module right |", "|---" * 11 + "|"]
    for name, group in groups.items():
        counts = Counter(row["outcome"] for row in group)
        modules = [row["module"] for row in group if row.get("module") is not None]
        cells = " | ".join(str(counts[outcome] or "") for outcome in outcomes)
        lines.append(f"| {name} | {len(group)} | {cells} | {sum(modules)} of {len(modules)} |")
    return "\n".join(lines)


def main(command: str, folder: Path, *arguments: str) -> None:
    if command == "run":
        seed, cases, slots, *kinds = arguments
        chosen = tuple(kinds) or KINDS
        Bench(folder).run(list(drawn(int(seed), int(cases), chosen)), int(slots))
        return
    scored_rows = [scored(folder, row) for row in rows(folder)]
    for row in scored_rows:
        if (
            not arguments
            or row["outcome"] in arguments
            or (arguments == ("module",) and row.get("module") is False)
        ):
            print(line_of(row))
    print(table(scored_rows, "kind"), table(scored_rows, "layout"), sep="\n\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
