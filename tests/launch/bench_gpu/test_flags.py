"""The settings have never met a GPU; Megatron's own parser can at least tell whether it knows them."""

import json
import subprocess
import sys

from tools.launch.bench_gpu.settings import SETTINGS
from tools.launch.options import Options
from tools.launch.runtime import ON_HOST
from tools.launch.target import parse_target
from tools.launch.train import compose_target
from tools.spec.files import ROOT

PARSE = """
import argparse, json, sys
from megatron.training.arguments import add_megatron_arguments
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
for words in json.load(sys.stdin):
    known, unknown = parser.parse_known_args(words)
    kept = ("fp16", "bf16", "gradient_accumulation_fusion", "profile_step_end", "eval_iters")
    print(json.dumps([unknown, {name: getattr(known, name) for name in kept}]))
"""


def test_megatron_knows_every_flag_of_every_setting() -> None:
    target = parse_target("train-baseline-gpt2-large-1gpu")
    flags = [
        compose_target(
            target, (), Options(data="owt-ds/any", fused=s.fused, extra=s.extra), ON_HOST
        ).arguments()
        for s in SETTINGS
    ]
    done = subprocess.run(
        (sys.executable, "-c", PARSE),
        input=json.dumps(flags),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(answers) == len(SETTINGS)
    for setting, (unknown, known) in zip(SETTINGS, answers, strict=True):
        assert unknown == []
        assert (known["fp16"], known["bf16"]) == (setting.dtype == "fp16", setting.dtype == "bf16")
        assert known["gradient_accumulation_fusion"] == ("gradient_gemm" in setting.fused)
        assert known["eval_iters"] == 0
        assert not setting.profiled or known["profile_step_end"] < setting.iterations
