"""Driver, GPUs and how they are joined, as nvidia-smi tells: NVML's Python package comes with setup."""

import re
import shutil
from pathlib import Path

from tools.launch.doctor.finding import FAIL, PASS, WARN, Finding, ask

QUERY = "index,name,memory.total,memory.used,driver_version"
BUSY_MIB = 2048
ON_CPU = "'make demo' and the -<N>cpu targets work without"
NVLINK = re.compile(r"NV\d+")


def check_devices() -> "list[Finding]":
    """Rows for driver, GPUs and topology."""
    if shutil.which("nvidia-smi") is None:
        if Path("/dev/nvidiactl").exists():
            fix = (
                "give the container NVIDIA's utilities (NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
            )
            return [Finding(WARN, "Driver", "loaded, but nvidia-smi is missing", fix)]
        return [
            Finding(WARN, "Driver", "no NVIDIA driver", "install it for GPU targets; " + ON_CPU)
        ]
    answer = ask(["nvidia-smi", "--query-gpu=" + QUERY, "--format=csv,noheader,nounits"])
    rows = [[word.strip() for word in line.split(",")] for line in answer.out.splitlines()]
    rows = [row for row in rows if len(row) == len(QUERY.split(","))]
    if not answer.good or not rows:
        fix = "see 'nvidia-smi' and 'dmesg'; after an update of the driver the machine must restart"
        return [Finding(FAIL, "Driver", "nvidia-smi fails: " + answer.problem, fix)]
    findings = [Finding(PASS, "Driver", rows[0][4]), _gpus(rows)]
    return findings + ([_topology(len(rows))] if len(rows) > 1 else [])


def _gpus(rows: "list[list[str]]") -> Finding:
    shown = "; ".join(f"{row[0]}: {row[1]}, {row[2]} MiB" for row in rows)
    busy = [row[0] for row in rows if row[3].isdigit() and int(row[3]) > BUSY_MIB]
    if busy:
        fix = "end what runs there, or choose others with CUDA_VISIBLE_DEVICES="
        return Finding(WARN, "GPUs", "{} (in use: {})".format(shown, ", ".join(busy)), fix)
    if len(rows) == 1:
        fix = "five of the six published runs need two; -2cpu targets show them"
        return Finding(WARN, "GPUs", shown, fix)
    return Finding(PASS, "GPUs", shown)


def _topology(gpus: int) -> Finding:
    answer = ask(["nvidia-smi", "topo", "-m"])
    links = _links(answer.out, gpus)
    if not links:
        return Finding(WARN, "Topology", "nvidia-smi does not tell", "see 'nvidia-smi topo -m'")
    shown = ", ".join(sorted(set(links)))
    if all(NVLINK.fullmatch(link) for link in links):
        return Finding(PASS, "Topology", shown + " (NVLink) between all GPUs")
    fix = "the published numbers were made over NVLink; here TP, SP and CP will take longer"
    return Finding(WARN, "Topology", shown + " between GPUs", fix)


def _links(matrix: str, gpus: int) -> "list[str]":
    """Entries above the diagonal of nvidia-smi's matrix, whose rows begin with `GPU<n>`."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", matrix)
    found = {}
    for line in plain.splitlines():
        words = line.split()
        if words and re.fullmatch(r"GPU\d+", words[0]) and "X" in words:
            found[int(words[0][3:])] = words[1 : 1 + gpus]
    return [row[peer] for gpu, row in sorted(found.items()) for peer in range(gpu + 1, len(row))]
