"""Patches for tensors without contents in a world of one process, beyond the patches for CPU ranks.

Each patch replaces a function of torch or Megatron; its reason stands in `_PATCHES`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_patches.registry import Patch, Replacement
from parakit.accounting import PROCESS_GROUP_METHODS


def _replace_with(function: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    """Return a replacement that ignores the original and gives `function`."""
    return lambda original: function


@contextlib.contextmanager
def _keep_random_state(*_: Any, **__: Any) -> Iterator[None]:
    """Run the `with` block without a change of the random number generator."""
    yield


def _all_gather_object(gathered: list[Any], item: Any, _: Any = None, **__: Any) -> None:
    """Fill the list of all ranks' objects with this rank's object."""
    gathered[:] = [item] * len(gathered)


def _build_converter(dtype: torch.dtype) -> Callable[[Any], Callable[..., torch.nn.Module]]:
    """Return a function that makes a replacement of `Module.half` or `Module.bfloat16` for fake tensors.

    torch's own methods swap fake parameters in place, which fails if a weak reference to a parameter exists. The
    replacement creates new parameters. It copies the attributes that Megatron set on the old parameters.
    """

    def convert(model: torch.nn.Module) -> torch.nn.Module:
        """Convert all floating-point parameters and buffers of a model in place, and return the model."""
        for module in model.modules():
            for name, old in module._parameters.items():
                if old is not None and old.is_floating_point() and old.dtype != dtype:
                    new = torch.nn.Parameter(old.detach().to(dtype), old.requires_grad)
                    new.__dict__.update(old.__dict__)
                    module._parameters[name] = new
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.to(dtype)
        return model

    return _replace_with(convert)


def _fuse_adam(original: Callable[..., None]) -> Callable[..., None]:
    """Return an `__init__` of AdamW that calls `original` with `fused=True`, unless the caller sets `fused`."""

    @functools.wraps(original)
    def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **{"fused": True, **kwargs})

    return init


def _dropout_in_one_kernel(
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,  # noqa: ARG001 - torch's signature
) -> torch.Tensor:
    """Apply dropout with torch's operator that stores the mask in one byte per element.

    Outside training, or if `p` is 0, `input` itself is returned.
    """
    return torch.native_dropout(input, p, training)[0] if training and p else input


class _RmsNorm(torch.autograd.Function):
    """RMSNorm that stores its input and weight for backward, as Transformer Engine's kernel does."""

    @staticmethod
    def forward(
        ctx: Any,
        rms_norm: Callable[..., torch.Tensor],
        input: torch.Tensor,
        shape: Sequence[int],
        weight: torch.Tensor,
        eps: float | None,
    ) -> torch.Tensor:
        """Return RMSNorm of `input`, computed by torch's `rms_norm`, and store input and weight for backward."""
        ctx.save_for_backward(input, weight)
        ctx.recompute = lambda x, w: rms_norm(x, shape, w, eps)
        return rms_norm(input, shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of input and weight, from a recomputed norm."""
        input, weight = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            output = ctx.recompute(input, weight)
        input_gradient, weight_gradient = torch.autograd.grad(output, (input, weight), gradients)
        return None, input_gradient, None, weight_gradient, None


def _norm_in_one_kernel(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a replacement of torch's `rms_norm` that stores for backward what a fused kernel stores."""

    def rms_norm(
        input: torch.Tensor,
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        if weight is None:
            return original(input, normalized_shape, weight, eps)
        output: torch.Tensor = _RmsNorm.apply(original, input, normalized_shape, weight, eps)
        return output

    return rms_norm


def _split_into_copies(mixed: torch.Tensor, dim: int, sizes: Sequence[int]) -> tuple[Any, ...]:
    """Return the parts of a tensor along `dim` as tensors with storage of their own."""
    return tuple(part.contiguous() for part in torch.split(mixed, list(sizes), dim))


def _disable_fp8_by_default(original: Callable[..., None]) -> Callable[..., None]:
    """Return an `__init__` of CheckpointWithoutOutput that passes None to `original` if `fp8` is False.

    Megatron takes any other value than None to mean that FP8 is on.
    """

    @functools.wraps(original)
    def init(checkpoint: Any, fp8: bool | None = None) -> None:
        original(checkpoint, fp8 or None)

    return init


def even_loads(routed: int, experts: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the tokens per expert, shape [experts], with sum `routed`; the first experts get the remainder."""
    loads = np.full(experts, routed // experts, dtype=np.int64)
    loads[: routed % experts] += 1
    return loads


def _route_evenly(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of the dispatcher's `preprocess` that sends equally many tokens to all experts.

    In a dry run the output of the router is a fake tensor, from which no numbers of tokens can be read.
    """

    @functools.wraps(original)
    def preprocess(dispatcher: Any, routing_map: Any) -> Any:
        # The original all-gathers the counts, which is one of the calls to count.
        original(dispatcher, routing_map)
        tensor, expert, local = dispatcher.tp_size, dispatcher.ep_size, dispatcher.num_local_experts
        loads = even_loads(dispatcher.num_out_tokens, dispatcher.num_experts)
        first = dispatcher.local_expert_indices[0]
        # Tokens by tensor-parallel rank, expert-parallel rank and local expert: [tensor, expert, local].
        received = np.tile(loads[first : first + local], (tensor, expert, 1))
        if expert > 1 or tensor > 1:
            dispatcher.input_splits = loads.reshape(expert, local).sum(axis=1)
            dispatcher.output_splits = received.sum(axis=2)[0]
            dispatcher.output_splits_tp = received.sum(axis=(1, 2))
        if local > 1:
            dispatcher.num_global_tokens_per_local_expert = received.reshape(-1, local)
            order = np.arange(tensor * dispatcher.num_experts)
            dispatcher.sort_input_by_local_experts = order.reshape(-1, local).T.ravel()
            dispatcher.restore_output_by_local_experts = order.reshape(local, -1).T.ravel()
        return received.sum(axis=(0, 1))

    return preprocess


_RANDOM = "megatron.core.tensor_parallel.random"
_DISPATCHERS = "megatron.core.transformer.moe.token_dispatcher"
_PATCHES: tuple[tuple[str, str, dict[str, Callable[[Any], Any]]], ...] = (
    (
        "calls_end_at_the_group",
        "torch has no fake kernel for some of c10d's operators (allreduce_coalesced_)",
        dict.fromkeys(
            (f"torch.distributed:ProcessGroup.{name}" for name in PROCESS_GROUP_METHODS),
            _replace_with(lambda group, *args, **kwargs: FakeWork()),
        ),
    ),
    (
        "one_rank_alone",
        "objects gathered from other ranks would be unpickled from empty tensors",
        {"torch.distributed:all_gather_object": _replace_with(_all_gather_object)},
    ),
    (
        "no_random_numbers",
        "the RNG tracker compares the generator's state, which is no fake tensor",
        {f"{_RANDOM}:CudaRNGStatesTracker.fork": _replace_with(_keep_random_state)},
    ),
    (
        "fused_gradient_norm",
        "the CPU patch's double precision would hold copies of gradients that no GPU holds",
        {
            # The result has shape [1] and dtype fp32, as that of the fused kernel on GPUs.
            "megatron.core.optimizer.clip_grads:l2_norm_impl": _replace_with(
                lambda *args, **kwargs: (torch.zeros(1), None)
            )
        },
    ),
    (
        "fused_adam",
        "torch's plain Adam holds temporaries that the fused ones of Transformer Engine do not",
        {"torch.optim:AdamW.__init__": _fuse_adam},
    ),
    (
        "one_byte_dropout_masks",
        "on a CPU dropout keeps its mask in the activations' dtype, on a GPU in one byte",
        {"torch.nn.functional:dropout": _replace_with(_dropout_in_one_kernel)},
    ),
    (
        "one_kernel_rms_norm",
        "torch's own holds two fp32 copies of its input, which Transformer Engine's does not",
        {"torch.nn.functional:rms_norm": _norm_in_one_kernel},
    ),
    (
        "values_of_their_own",
        "V would keep the storage of Q and K beside their rotated copies; fused kernels copy V",
        {"megatron.core.transformer.attention:SplitAlongDim": _replace_with(_split_into_copies)},
    ),
    (
        "outputs_computed_again",
        "a C++ extension, compiled at its first use, would point dropped storage at new contents",
        # Tensors without contents need not share storage: recomputed ones are counted, and waiting ones have no bytes.
        {f"{_RANDOM}:_get_share_storage": _replace_with(lambda: lambda waiting, recomputed: None)},
    ),
    (
        "recomputed_in_full_precision",
        "its default of False counts as fp8 (`is not None`), which asks Transformer Engine",
        {f"{_RANDOM}:CheckpointWithoutOutput.__init__": _disable_fp8_by_default},
    ),
    (
        "fake_parameters",
        "torch converts a fake module's dtype by swapping tensors, which weak references forbid",
        {
            "torch.nn:Module.half": _build_converter(torch.float16),
            "torch.nn:Module.bfloat16": _build_converter(torch.bfloat16),
        },
    ),
    (
        "even_routing",
        "how many tokens an expert gets is read from the router's output, which has no contents",
        {f"{_DISPATCHERS}:MoEAlltoAllTokenDispatcher.preprocess": _route_evenly},
    ),
)
FAKE_PATCHES = tuple(
    Patch(
        name,
        reason,
        lambda context: True,
        tuple(Replacement(*item) for item in replacements.items()),
    )
    for name, reason, replacements in _PATCHES
)


class AnswerForContents(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that answers with a fixed number when Megatron reads a number from a tensor without contents.

    The numbers are those of a healthy iteration. Booleans are False, because Megatron asks whether losses and
    gradients are NaN or infinite. Floats are 0: they are overflow flags and sums such as the gradient norm. Integers
    are 1: they are votes of all ranks and counts of tokens.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and return its result.

        If the operator reads a number from a tensor without contents, the result is False, 0.0 or 1, by the tensor's
        dtype.
        """
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            dtype = args[0].dtype
            return False if dtype == torch.bool else 0.0 if dtype.is_floating_point else 1
