"""The settings have never run on a GPU; Megatron's own parser can at least say whether it knows them."""

from tests.launch.megatron_parser import MegatronParser
from tools.launch.job import parse_target
from tools.launch.options import Options
from tools.launch.runtime import ON_HOST
from tools.launch.train import compose_job
from tools.study.bench_gpu.plan import SETTINGS


def test_megatron_knows_every_flag_of_every_setting(megatron_parser: MegatronParser) -> None:
    target = parse_target("train-baseline-gpt2-large-1gpu")
    flags = [
        compose_job(
            target.under(Options(data="owt-ds/any", fused=s.fused, extra=s.extra)), ON_HOST
        ).arguments()
        for s in SETTINGS
    ]
    answers = map(megatron_parser.known, flags)
    for setting, (unknown, known) in zip(SETTINGS, answers, strict=True):
        assert unknown == []
        assert (known["fp16"], known["bf16"]) == (setting.dtype == "fp16", setting.dtype == "bf16")
        assert known["gradient_accumulation_fusion"] == ("gradient_gemm" in setting.fused)
        assert known["eval_iters"] == 0
        assert not setting.profiled or known["profile_step_end"] < setting.iterations
