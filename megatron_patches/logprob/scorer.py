"""Run the forward passes of an iteration without training, as often as needed and always on the same micro batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from megatron_patches.capture.data import replay_data, unwrap_chunk
from megatron_patches.capture.parameters import ParameterMap
from megatron_patches.capture.rank import gather_module_names
from megatron_patches.capture.start import get_rng_tracker


class Scorer:
    """The trainer's model, forward step and data, in evaluation mode."""

    def __init__(self, forward_step: Any, data: Any, model: list[Any], optimizer: Any) -> None:
        self.forward_step, self.data, self.model, self.optimizer = (
            forward_step,
            data,
            model,
            optimizer,
        )
        self.chunks = [unwrap_chunk(chunk) for chunk in model]
        self.names = gather_module_names(self.chunks)
        self.parameters = ParameterMap(self.chunks, self.names)
        for chunk in model:
            chunk.eval()
        self._random_states = (torch.get_rng_state(), get_rng_tracker().get_states())

    def use_sequences(self, tokens: Any) -> None:
        """Let the data iterators give the sequences [sequences, positions] in place of the data set's samples.

        Micro batches go to data-parallel ranks in turn. Everything but tokens and labels stays as it is in the first
        micro batch of the data set.
        """
        from megatron.core import mpu
        from megatron.training import get_args

        size, num_ranks = get_args().micro_batch_size, mpu.get_data_parallel_world_size()
        micro_batches = torch.split(torch.from_numpy(tokens), size)
        micro_batches_of_rank = micro_batches[mpu.get_data_parallel_rank() :: num_ranks]
        iterators = self.data if isinstance(self.data, list) else [self.data]
        for iterator in iterators:
            if iterator is not None:
                iterator.iterable = _replace_tokens(next(iterator), micro_batches_of_rank)

    @contextmanager
    def replay(self) -> Iterator[Callable[[], None]]:
        """Yield a function that lets the data iterators begin with the iteration's first micro batch again."""
        with replay_data(self.data) as rewind:
            yield rewind

    def run(self, wrap_step: Callable[[Any], Any] = lambda step: step) -> None:
        """Run the forward passes of all micro batches of an iteration, without gradients.

        Every run draws the same random numbers. If a fault leaves dropout on, the masks are those of the first run.

        Args:
            wrap_step: Returns the forward step to run, given the trainer's own.
        """
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.training import get_args

        torch_state, tracker_states = self._random_states
        torch.set_rng_state(torch_state)
        get_rng_tracker().set_states(tracker_states)
        args = get_args()
        # The check belongs to Megatron's rerun state machine, which refuses it outside of a training step.
        no_check = patch.object(args, "check_for_nan_in_loss_and_grad", False)
        with torch.no_grad(), no_check:
            get_forward_backward_func()(
                forward_step_func=wrap_step(self.forward_step),
                data_iterator=self.data,
                model=self.model,
                num_microbatches=get_num_microbatches(),
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                decoder_seq_length=args.decoder_seq_length,
                forward_only=True,
            )

    @contextmanager
    def preserve_weights(self) -> Iterator[Callable[[], None]]:
        """Yield a function that restores all parameters and buffers; they are restored at the end as well."""
        tensors = [
            tensor for chunk in self.chunks for tensor in (*chunk.parameters(), *chunk.buffers())
        ]
        copies = [tensor.detach().clone() for tensor in tensors]

        def restore() -> None:
            with torch.no_grad():
                for tensor, copy in zip(tensors, copies, strict=True):
                    tensor.copy_(copy)

        with ExitStack() as stack:
            stack.callback(restore)
            yield restore


def _replace_tokens(batch: dict[str, Any], sequences: Sequence[torch.Tensor]) -> Iterator[Any]:
    """Yield the batch once per micro batch, with the micro batch's sequences as tokens and labels.

    The label of the last position is the first token, because no token follows it. It is not compared.
    """
    for tokens in sequences:
        yield {**batch, "tokens": tokens, "labels": torch.roll(tokens, -1, dims=1)}
