import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from parakit.config.run import DeviceKind
from parakit.formatting.units import bit_rate
from parakit.launch.job import parse_target
from parakit.launch.network import format_rate, network_problems, parse_rate, run_over_shaped_link
from parakit.launch.options import options_from_texts
from parakit.launch.train import compose_job

CAN_SHAPE = os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")

ALL_REDUCE = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.ones(250_000)
dist.all_reduce(tensor)
assert float(tensor[0]) == 2
dist.destroy_process_group()  # else gloo's threads may abort the process at its end
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("text", "bits", "shown"),
    [
        ("1gbps", 10**9, "1 Gbit/s"),
        ("2.5Gbps", 2_500_000_000, "2.5 Gbit/s"),
        ("200mbps", 2 * 10**8, "200 Mbit/s"),
    ],
)
def test_rates_are_read_and_shown(text: str, bits: int, shown: str) -> None:
    assert parse_rate(text) == bits
    assert bit_rate(bits) == shown
    assert parse_rate(format_rate(bits)) == bits


@pytest.mark.parametrize("text", ["fast", "1", "1gb", "0gbps", "-1gbps"])
def test_what_is_no_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=f"NET={text} is not a rate such as 1gbps or 200mbps"):
        options_from_texts({"NET": text})


def test_each_obstacle_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    problems = "\n".join(network_problems(10**11, 3, DeviceKind.GPU))
    assert "name a target that ends in cpu" in problems
    assert "3 is odd" in problems
    assert "use 10gbps or less, and 'make plan' for faster links" in problems
    assert "install the package iproute2" in problems
    assert "run as root" in problems


def test_a_shaped_run_is_the_same_program_behind_the_link() -> None:
    target = parse_target("train-dp2-gpt2-tiny-2cpu")
    plain = compose_job(target)
    slow = replace(plain, spec=replace(plain.spec, link_bits_per_second=10**9))
    program = slow.command()[slow.command().index("--") + 1 :]
    assert slow.command()[1:5] == ("-m", "parakit.launch.network", "1gbps", "2")
    assert plain.command()[-len(program) :] == program


@pytest.mark.slow
@pytest.mark.skipif(not CAN_SHAPE, reason="needs root, ip and tc")
@pytest.mark.parametrize("code", [0, 7])
def test_ranks_connect_across_the_link_and_leave_nothing_behind(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    script = tmp_path / "all_reduce.py"
    script.write_text(ALL_REDUCE)
    ended = run_over_shaped_link(10**9, 2, (str(script), str(code)))
    assert (ended == 0) == (code == 0)
    sent = [int(line.split()[-2]) for line in capfd.readouterr().out.splitlines() if "sent" in line]
    # Each side sends the million bytes once, and some tens of kB of headers and of the rendezvous.
    assert len(sent) == 2
    assert all(1_000_000 < count < 1_300_000 for count in sent)
    assert not list(Path("/run/netns").glob(f"kit{os.getpid()}*"))
