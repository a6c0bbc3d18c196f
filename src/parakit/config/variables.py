"""Environment variables that the kit sets for processes that it starts, each named once.

What a user sets is in `parakit.config.settings`. `KIT_IMAGE`, which the kit's image sets, is read by
`parakit.cluster.checks.result`, and `KIT_PYTHON`, the Python of its scripts, by the shell.
"""

from __future__ import annotations

COMMAND = "KIT_COMMAND"
"""Command that the user typed for a tool; unset if it was `python -m`."""
PYTHON = "KIT_PYTHON"

INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Network interfaces of a node; they differ from node to node."""

DEVICE = "KIT_DEVICE"
"""Kind of device of the ranks: `cpu` or `gpu`."""
SHARE_GPU = "KIT_SHARE_GPU"
"""`1` puts every rank on one GPU."""
FUSED = "KIT_FUSED"
"""Comma-separated patches of `megatron_patches.fused` to apply."""
ALLOW_UNKNOWN_MEGATRON = "KIT_ALLOW_UNKNOWN_MEGATRON"
"""`1` allows training with a Megatron version that the patches are untested with."""
START_WEIGHTS = "KIT_START_WEIGHTS"
"""Folder of the shared initial checkpoint; unset if a strategy loads the checkpoint with `--load`.
"""
START_NOISE = "KIT_START_NOISE"
"""Seed of the noise added to parameters with constant initial values; unset adds no noise."""
PATCH_FILE, PATCH_FILE_SHA256 = "KIT_PATCH_FILE", "KIT_PATCH_FILE_SHA256"
"""Comma-separated Python files that every rank executes before training, and their expected hashes.
"""

LEDGER = "KIT_LEDGER"
"""Folder for the ranks' communication logs and memory accounting. If unset, nothing is recorded."""
LEDGER_ALTERNATE = "KIT_LEDGER_ALTERNATE"
"""Set by the benchmark of the recording's cost: odd iterations are not recorded."""
CAPTURE = "KIT_CAPTURE"
"""Folder for the tensors of one captured iteration; unset captures nothing."""
CAPTURE_ITERATION = "KIT_CAPTURE_ITERATION"
CAPTURE_SEEDS = "KIT_CAPTURE_SEEDS"
"""Number of repetitions of the iteration with changed weights."""
CAPTURE_DRIFT = "KIT_CAPTURE_DRIFT"
"""Seed of the random signs with which earlier iterations' weights are changed by one rounding
error.
"""
EXECUTED = "KIT_EXECUTED"
"""Folder in which each rank records the Megatron files that it executes."""
CAPTURE_FORCED = "KIT_CAPTURE_FORCED"
"""Folder of tensors that replace the model's own."""
CAPTURE_PARTS = "KIT_CAPTURE_PARTS"
"""If set, each gradient is also written as the contributions of the micro batches and of the
iteration before.
"""
LOGPROB = "KIT_LOGPROB"
"""File of a `ScoreRequest`: the ranks score tokens in place of the first training step, and end."""

STACKS = "KIT_STACKS"
"""Folder for the ranks' Python stacks, written on `STACKS_SIGNAL`."""
RUN_MARK = "KIT_RUN_MARK"
"""Value that distinguishes the processes of one run from all others."""
