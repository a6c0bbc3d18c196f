"""Where a run is made: machine, devices and how they are joined, software of host or image."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from tools.launch.checks.docker import image_id
from tools.launch.compose import Launch
from tools.launch.container import docker
from tools.launch.container.versions import installed_versions
from tools.launch.devices import (
    describe_links,
    driver_version,
    find_links,
    gpu_names,
    processor_name,
    visible_gpus,
)
from tools.records import run as records
from tools.spec.run import DeviceKind

PROBE_SECONDS = 180.0
IMAGES_FOLDER = ".images"
"""In the runs folder: what was found in each image, by digest, so that it is asked once."""


@dataclass(frozen=True)
class Provenance:
    """What `run.json` says about where."""

    host: records.Host
    software: dict[str, str]
    image: str | None = None


def find_provenance(launch: Launch, runs: Path) -> Provenance:
    """Look at machine and software."""
    container = launch.runtime.container
    if container is None:
        return Provenance(_host(launch), installed_versions(), os.environ.get("KIT_IMAGE"))
    digest = image_id(container.image) or "unknown"
    software = _software_of_image(container, runs / IMAGES_FOLDER / f"{digest}.json")
    return Provenance(_host(launch), software, f"{container.image}@{digest}")


def _host(launch: Launch) -> records.Host:
    on_cpu = launch.spec.device is DeviceKind.CPU
    nodes, local = launch.nodes, launch.local_devices
    # Node 0 has seen that all have the same GPUs, or it would not have started.
    own = gpu_names()[:1] * local if launch.spec.shares_gpu else gpu_names()[:local]
    names = (processor_name(),) * local if on_cpu else own
    links = () if on_cpu else find_links(visible_gpus()[:local])
    over = f"a link shaped to {launch.network}" if launch.network else "loopback"
    if nodes is not None:
        over = f"{nodes.count} nodes, which meet at {nodes.address}"
    loopback = f"gloo over {over}" if on_cpu and launch.devices > 1 else None
    return records.Host(
        name=platform.node(),
        cpu=processor_name(),
        cores=psutil.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        devices=names * (nodes.count if nodes else 1),
        driver=driver_version(),
        interconnect=describe_links(links) or loopback,
        links=links,
        nodes=nodes.hosts if nodes else (),
    )


def _software_of_image(container: docker.Container, cache: Path) -> dict[str, str]:
    """Versions inside an image; empty if it does not answer, because a run must not fail for that."""
    try:
        return dict(json.loads(cache.read_text()))
    except (OSError, ValueError):
        pass
    probe = docker.Container(container.image, container.user, gpus=False)
    command = probe.wrap(
        (docker.PYTHON, "-m", "tools.launch.container.versions"), (), "kit-versions"
    )
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PROBE_SECONDS
        )
        # The image's greeting comes first; the versions are the last line.
        software = dict(json.loads(answer.stdout.strip().rpartition("\n")[2]))
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(json.dumps(software, indent=2) + "\n")
    return software
