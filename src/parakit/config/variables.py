"""Environment variables that the kit sets for processes that it starts, each named once.

What a user sets is in `parakit.config.settings`. `KIT_IMAGE`, which the kit's image sets, is read by
`parakit.cluster.checks.result`, and `KIT_PYTHON`, the Python of its scripts, by the shell.
"""

from __future__ import annotations

COMMAND = "KIT_COMMAND"
"""What the user typed for a tool, where that is not `python -m`."""
PYTHON = "KIT_PYTHON"

INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Network interfaces of a node, which differ from node to node."""

DEVICE = "KIT_DEVICE"
"""What the ranks run on: `cpu` or `gpu`."""
SHARE_GPU = "KIT_SHARE_GPU"
"""`1` puts every rank on one GPU."""
FUSED = "KIT_FUSED"
"""Patches of `megatron_patches.fused` to apply, with commas."""
ALLOW_UNKNOWN_MEGATRON = "KIT_ALLOW_UNKNOWN_MEGATRON"
"""`1` lets a Megatron train that the patches were not tried with."""
START_WEIGHTS = "KIT_START_WEIGHTS"
"""Folder of the shared starting checkpoint; unset where a strategy loads it with --load."""
START_NOISE = "KIT_START_NOISE"
"""The seed of the noise that parameters which start constant get; unset leaves them as they are."""
PATCH_FILE, PATCH_FILE_SHA256 = "KIT_PATCH_FILE", "KIT_PATCH_FILE_SHA256"
"""Python files that every rank executes before it trains, with commas, and what they must hold."""

LEDGER = "KIT_LEDGER"
"""Folder that ranks write their ledgers to; without it nothing is installed and nothing is slower."""
LEDGER_ALTERNATE = "KIT_LEDGER_ALTERNATE"
"""Set by the benchmark of the ledger's cost: odd iterations are not watched."""
CAPTURE = "KIT_CAPTURE"
"""Folder that ranks write an iteration's tensors to; unset captures nothing."""
CAPTURE_ITERATION = "KIT_CAPTURE_ITERATION"
CAPTURE_SEEDS = "KIT_CAPTURE_SEEDS"
"""How many times to repeat the iteration with changed weights."""
CAPTURE_DRIFT = "KIT_CAPTURE_DRIFT"
"""Begins the random signs by which every earlier iteration's weights are off by a rounding error."""
EXECUTED = "KIT_EXECUTED"
"""Folder in which each rank notes the files of Megatron that it executes."""
CAPTURE_FORCED = "KIT_CAPTURE_FORCED"
"""Folder of tensors that take the place of the model's own."""
CAPTURE_PARTS = "KIT_CAPTURE_PARTS"
"""Set, gradients are also written as what each micro batch, and the iteration before, gave of them."""

STACKS = "KIT_STACKS"
"""Folder that ranks write their Python stacks to, on `STACKS_SIGNAL`."""
RUN_MARK = "KIT_RUN_MARK"
"""Tells the processes of one run from all others."""
