from typing import Any

from megatron_patches.cpu.fake_cuda import PATCH


def test_every_figure_of_memory_is_zero_on_a_cpu_rank() -> None:
    """`--log-memory-to-tensorboard` reads them by key."""
    (made,) = (
        replacement
        for replacement in PATCH.replacements
        if replacement.target == "torch.cuda:memory_stats"
    )
    stats: dict[str, Any] = made.make(None)()
    assert stats["reserved_bytes.all.current"] == 0
