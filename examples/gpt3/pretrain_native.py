"""Train the same GPT without Megatron: plain PyTorch, or DeepSpeed with `--engine deepspeed`.

It takes Megatron's flags, starts from the same weights (`--start-weights`, a torch_dist checkpoint),
reads the same batches in the same order and writes Megatron's iteration and validation lines; what it
does not do it refuses by name.

    torchrun --nproc-per-node 2 -m examples.gpt3.pretrain_native FLAGS…
"""

from __future__ import annotations

from megatron_patches.entry import name_entry_in_errors
from parakit.native import main

if __name__ == "__main__":
    with name_entry_in_errors(__file__):
        main()
