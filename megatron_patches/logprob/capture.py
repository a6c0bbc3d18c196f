"""Capture the tensors of a forward pass, in the format of `parakit.artifacts.capture`, without training."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_patches.capture.data import unwrap_chunk
from megatron_patches.capture.probes import Probes
from megatron_patches.capture.rank import describe_rank
from megatron_patches.capture.routing import capture_routing
from megatron_patches.capture.start import perturb_weights
from megatron_patches.logprob.scorer import Scorer
from parakit.artifacts.capture import (
    RESPONSES_FILE,
    START_BUFFER,
    START_WEIGHT,
    CaptureStage,
    CaptureWriter,
)
from parakit.capturing import Recording, RoundingProbe, Sink, StoredTensors


def capture_forward(scorer: Scorer, folder: Path, num_probes: int) -> None:
    """Write the weights and the tensors of all modules of one forward pass, for this rank.

    Args:
        scorer: The trainer's model and data.
        folder: Folder of the capture of all ranks.
        num_probes: Repetitions with weights that are changed by one rounding error, which measure the responses of
            the tensors. In the last repetition module inputs are changed, too. 0 measures none.
    """
    rank_folder = folder / f"rank-{torch.distributed.get_rank()}"
    writer = CaptureWriter(rank_folder)
    recording = Recording(writer)
    _write_weights(scorer, recording)
    with scorer.replay() as rewind:
        _run_with_probes(scorer, recording)
        writer.flush()
        if num_probes:
            probe = RoundingProbe(StoredTensors(rank_folder, writer.records))
            with scorer.preserve_weights() as restore:
                for seed in range(1, num_probes + 1):
                    restore()
                    perturb_weights(scorer.parameters, str(seed))
                    if seed == num_probes:
                        probe.round_otherwise(seed)
                    rewind()
                    _run_with_probes(scorer, probe)
            (rank_folder / RESPONSES_FILE).write_text(json.dumps(probe.responses))
    rank = describe_rank(
        scorer.chunks,
        scorer.names,
        scorer.parameters,
        norm_groups=(),
        optimizer=scorer.optimizer,
        loss_scales=(),
        weight_hashes=(),
    )
    writer.close(rank)


def _write_weights(scorer: Scorer, recording: Recording) -> None:
    """Write the weights and buffers with which the rank scores."""
    for slot, tensors in (
        (START_WEIGHT, scorer.parameters.parameters),
        (START_BUFFER, scorer.parameters.buffers),
    ):
        for tensor in tensors:
            for piece in scorer.parameters.pieces(tensor, tensor.data):
                recording.write_piece(CaptureStage.WEIGHTS, slot, piece)


def _run_with_probes(scorer: Scorer, sink: Sink) -> None:
    """Run the forward passes, and pass the tensors of all modules and the routers' choices to the sink."""
    probes = Probes(scorer.chunks, scorer.names, sink)

    def wrap_step(forward_step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward_step)
        def begin_and_forward(data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            sink.begin_micro_batch()
            probes.begin_micro_batch(scorer.chunks.index(unwrap_chunk(model)))
            return forward_step(data, model, *args, **kwargs)

        return begin_and_forward

    try:
        with capture_routing(scorer.chunks, scorer.names, sink):
            scorer.run(wrap_step)
    finally:
        probes.remove()
