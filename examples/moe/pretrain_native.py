"""Train a mixture of experts without Megatron: the GPT of `src/parakit/native` with experts for MLPs.

Top-k routing, balancing and z loss, data and expert parallelism over PyTorch's own all-to-all, AdamW, or
Muon for the matrices. Data, schedule and log are those of the dense model. Megatron's flags choose what
is trained:

    torchrun --nproc-per-node 2 -m examples.moe.pretrain_native --num-experts 8 FLAGS…
"""

from __future__ import annotations

from megatron_patches.entry import name_entry_in_errors
from parakit.native import main

if __name__ == "__main__":
    with name_entry_in_errors(__file__):
        main()
