"""Patches beyond the CPU's for tensors without contents in a world of one process."""

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


def _instead(function: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    """What makes this of any original."""
    return lambda original: function


@contextlib.contextmanager
def _no_random_state(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _all_gather_object(answers: list[Any], own: Any, _: Any = None, **__: Any) -> None:
    answers[:] = [own] * len(answers)


def _converted_to(dtype: torch.dtype) -> Callable[[Any], Callable[..., torch.nn.Module]]:
    """`Module.half` and `.bfloat16`: torch swaps fake parameters in place, and cannot where
    something refers to them weakly; here each is replaced, with what Megatron wrote on it."""

    def convert(model: torch.nn.Module) -> torch.nn.Module:
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

    return _instead(convert)


def _fused(original: Callable[..., None]) -> Callable[..., None]:
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
    return torch.native_dropout(input, p, training)[0] if training and p else input


class _RmsNorm(torch.autograd.Function):
    """Keeps its input and weight, as Transformer Engine's kernel does."""

    @staticmethod
    def forward(
        ctx: Any,
        rms_norm: Callable[..., torch.Tensor],
        input: torch.Tensor,
        shape: Sequence[int],
        weight: torch.Tensor,
        eps: float | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.again = lambda x, w: rms_norm(x, shape, w, eps)
        return rms_norm(input, shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = (kept.detach().requires_grad_() for kept in ctx.saved_tensors)
        with torch.enable_grad():
            output = ctx.again(input, weight)
        of_input, of_weight = torch.autograd.grad(output, (input, weight), gradients)
        return None, of_input, None, of_weight, None


def _norm_in_one_kernel(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def rms_norm(
        input: torch.Tensor,
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        if weight is None:
            return original(input, normalized_shape, weight, eps)
        found: torch.Tensor = _RmsNorm.apply(original, input, normalized_shape, weight, eps)
        return found

    return rms_norm


def _split_into_copies(mixed: torch.Tensor, dim: int, sizes: Sequence[int]) -> tuple[Any, ...]:
    return tuple(part.contiguous() for part in torch.split(mixed, list(sizes), dim))


def _unquantised(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(checkpoint: Any, fp8: bool | None = None) -> None:
        original(checkpoint, fp8 or None)

    return init


def even_loads(routed: int, experts: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Tokens for each expert, shape [experts], summing to `routed`."""
    loads = np.full(experts, routed // experts, dtype=np.int64)
    loads[: routed % experts] += 1
    return loads


def _evenly(original: Callable[..., Any]) -> Callable[..., Any]:
    """Routing without contents: as many tokens to each expert, and the rest to the first."""

    @functools.wraps(original)
    def preprocess(dispatcher: Any, routing_map: Any) -> Any:
        original(dispatcher, routing_map)  # Its all-gather of counts is one of the calls to see.
        tensor, expert, local = dispatcher.tp_size, dispatcher.ep_size, dispatcher.num_local_experts
        loads = even_loads(dispatcher.num_out_tokens, dispatcher.num_experts)
        own = dispatcher.local_expert_indices[0]
        from_each = np.tile(loads[own : own + local], (tensor, expert, 1))
        if expert > 1 or tensor > 1:
            dispatcher.input_splits = loads.reshape(expert, local).sum(axis=1)
            dispatcher.output_splits = from_each.sum(axis=2)[0]
            dispatcher.output_splits_tp = from_each.sum(axis=(1, 2))
        if local > 1:
            dispatcher.num_global_tokens_per_local_expert = from_each.reshape(-1, local)
            order = np.arange(tensor * dispatcher.num_experts)
            dispatcher.sort_input_by_local_experts = order.reshape(-1, local).T.ravel()
            dispatcher.restore_output_by_local_experts = order.reshape(local, -1).T.ravel()
        return from_each.sum(axis=(0, 1))

    return preprocess


_RANDOM = "megatron.core.tensor_parallel.random"
_DISPATCHERS = "megatron.core.transformer.moe.token_dispatcher"
_MAKERS: tuple[tuple[str, str, dict[str, Callable[[Any], Any]]], ...] = (
    (
        "calls_end_at_the_group",
        "torch has no fake kernel for some of c10d's operators (allreduce_coalesced_)",
        dict.fromkeys(
            (f"torch.distributed:ProcessGroup.{name}" for name in PROCESS_GROUP_METHODS),
            _instead(lambda group, *args, **kwargs: FakeWork()),
        ),
    ),
    (
        "one_rank_alone",
        "objects gathered from other ranks would be unpickled from empty tensors",
        {"torch.distributed:all_gather_object": _instead(_all_gather_object)},
    ),
    (
        "no_random_numbers",
        "the RNG tracker compares the generator's state, which is no fake tensor",
        {f"{_RANDOM}:CudaRNGStatesTracker.fork": _instead(_no_random_state)},
    ),
    (
        "fused_gradient_norm",
        "the CPU patch's double precision would hold copies of gradients that no GPU holds",
        {
            # A fused kernel's, as on GPUs: shape [1], fp32.
            "megatron.core.optimizer.clip_grads:l2_norm_impl": _instead(
                lambda *args, **kwargs: (torch.zeros(1), None)
            )
        },
    ),
    (
        "fused_adam",
        "torch's plain Adam holds temporaries that the fused ones of Transformer Engine do not",
        {"torch.optim:AdamW.__init__": _fused},
    ),
    (
        "one_byte_dropout_masks",
        "on a CPU dropout keeps its mask in the activations' dtype, on a GPU in one byte",
        {"torch.nn.functional:dropout": _instead(_dropout_in_one_kernel)},
    ),
    (
        "one_kernel_rms_norm",
        "torch's own holds two fp32 copies of its input, which Transformer Engine's does not",
        {"torch.nn.functional:rms_norm": _norm_in_one_kernel},
    ),
    (
        "values_of_their_own",
        "V would keep the storage of Q and K beside their rotated copies; fused kernels copy V",
        {"megatron.core.transformer.attention:SplitAlongDim": _instead(_split_into_copies)},
    ),
    (
        "outputs_computed_again",
        "a C++ extension, compiled at its first use, would point dropped storage at new contents",
        # Without contents nothing need be shared: what was recomputed counts, what waits has no bytes.
        {f"{_RANDOM}:_get_share_storage": _instead(lambda: lambda waiting, recomputed: None)},
    ),
    (
        "recomputed_in_full_precision",
        "its default of False counts as fp8 (`is not None`), which asks Transformer Engine",
        {f"{_RANDOM}:CheckpointWithoutOutput.__init__": _unquantised},
    ),
    (
        "fake_parameters",
        "torch converts a fake module's dtype by swapping tensors, which weak references forbid",
        {
            "torch.nn:Module.half": _converted_to(torch.float16),
            "torch.nn:Module.bfloat16": _converted_to(torch.bfloat16),
        },
    ),
    (
        "even_routing",
        "how many tokens an expert gets is read from the router's output, which has no contents",
        {f"{_DISPATCHERS}:MoEAlltoAllTokenDispatcher.preprocess": _evenly},
    ),
)
FAKE_PATCHES = tuple(
    Patch(name, reason, lambda context: True, tuple(Replacement(*one) for one in made.items()))
    for name, reason, made in _MAKERS
)


class AnswerForContents(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers as a healthy iteration would.

    Truths are asked of losses and gradients (NaN? infinite?): no. Floats are flags and sums that
    should be 0 (overflow found, gradient norm). Integers are votes and counts that should not be
    (was the update made everywhere, tokens of a loss): 1.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator; a number where it would have read one."""
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            dtype = args[0].dtype
            return False if dtype == torch.bool else 0.0 if dtype.is_floating_point else 1
