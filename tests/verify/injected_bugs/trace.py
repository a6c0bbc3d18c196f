"""Every tensor of one iteration as a hash, in the order of computation, bit for bit.

Two runs of one strategy on CPU ranks are the same to the last bit, so the first hash that differs
between the injected and the healthy strategy is the place where the injected bug acts. This knows
nothing of alignment or tolerance: it is the answer that `parakit.verify` must find by comparing with
another strategy.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

STAGES = (
    "inputs",
    "outputs",
    "loss",
    "activation gradients",
    "local gradients",
    "reduced gradients",
    "norm",
    "optimizer state",
    "weights",
)
Event = list[str]
"""Stage, name, slot, hash."""


class Trace:
    """Watches a rank's train steps, and writes what it saw after the last."""

    def __init__(self, path: Path, step: int, last_step: int) -> None:
        self.path, self.step, self.last = path, step, last_step
        self.events: list[Event] = []
        self.steps: list[dict[str, Any]] = []
        self._seen: Counter[tuple[str, str, str]] = Counter()
        self._number = 0

    def install(self) -> None:
        """Wrap Megatron's step, its finalisation of gradients and the start of each reduction."""
        from megatron.core.distributed import param_and_grad_buffer as buffer
        from megatron.training import training

        group = buffer._ParamAndGradBucketGroup
        group.start_grad_sync = self._start(group.start_grad_sync)
        training.train_step = self._step(training.train_step)
        training.finalize_model_grads = self._finalise(training.finalize_model_grads)

    def note(self, stage: str, name: str, slot: str, tensor: Any) -> None:
        """Hash a tensor."""
        key = (stage, name, slot)
        self.events.append([stage, name, f"{slot}#{self._seen[key]}", digest(tensor)])
        self._seen[key] += 1

    def _step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(forward: Any, data: Any, model: Any, optimizer: Any, *args: Any, **k: Any) -> Any:
            self._number += 1
            self.chunks = [_unwrapped(chunk) for chunk in model]
            self.names = [_global_names(chunk) for chunk in self.chunks]
            self.parameters = {
                id(parameter): (name, parameter) for name, parameter in self._named_parameters()
            }
            watched = self._number == self.step
            handles = self._hook() if watched else []
            answer = original(forward, data, model, optimizer, *args, **k)
            for handle in handles:
                handle.remove()
            if watched:
                self._note_update(answer, optimizer)
            self._finish_step(answer)
            return answer

        return step

    def _finalise(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def finalise(model: Any, *args: Any, **kwargs: Any) -> Any:
            if not model[0].ddp_config.overlap_grad_reduce:
                self._note_gradients("local gradients", self.parameters)
            answer = original(model, *args, **kwargs)
            self._note_gradients("reduced gradients", self.parameters)
            return answer

        return finalise

    def _start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Of reductions that overlap the backward pass: at its end some gradients are reduced."""

        @functools.wraps(original)
        def start(group: Any, *args: Any, **kwargs: Any) -> Any:
            if group.ddp_config.overlap_grad_reduce:
                parameters = (
                    parameter for bucket in group.buckets for parameter in bucket.params_list
                )
                self._note_gradients("local gradients", map(id, parameters))
            return original(group, *args, **kwargs)

        return start

    def _note_gradients(self, stage: str, parameters: Iterable[int]) -> None:
        if self._number != self.step:
            return
        for parameter in parameters:
            name, value = self.parameters[parameter]
            if getattr(value, "main_grad", None) is not None:
                self.note(stage, name, "", value.main_grad)

    def _named_parameters(self) -> Iterator[tuple[str, Any]]:
        for chunk, names in zip(self.chunks, self.names, strict=True):
            for name, parameter in chunk.named_parameters():
                module, _, last = name.rpartition(".")
                yield f"{names[module]}.{last}".lstrip("."), parameter

    def _note_update(self, answer: Any, optimizer: Any) -> None:
        self.events.append(["norm", "grad_norm", "", repr(answer[5])])
        held: list[tuple[str, dict[str, Any]]] = []
        for number, part in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
            inner = part.optimizer
            names = self._names_of_main(part)
            for group in inner.param_groups:
                for index, parameter in enumerate(group["params"]):
                    name = names.get(id(parameter), f"{number}.{index}")
                    # A tensor that is none of the model's is a copy, the optimizer's own.
                    copy = {} if id(parameter) in self.parameters else {"weight": parameter}
                    held.append((name, {**inner.state[parameter], **copy}))
        # In the model's order: an optimizer that shards has its buffers', which is another.
        order = [name for name, _ in self.parameters.values()]
        for name, values in sorted(held, key=lambda entry: (*order, entry[0]).index(entry[0])):
            for slot, value in sorted(values.items()):
                self.note("optimizer state", name, slot, value)
        for chunk, names_of in zip(self.chunks, self.names, strict=True):
            for name, value in chunk.state_dict().items():
                module, _, last = name.rpartition(".")
                if hasattr(value, "detach"):
                    stable_name = f"{names_of.get(module, module)}.{last}".lstrip(".")
                    self.note("weights", stable_name, "", value)

    def _names_of_main(self, part: Any) -> dict[int, str]:
        pairs = (
            ("float16_groups", "fp32_from_float16_groups"),
            ("model_fp32_groups", "shard_fp32_groups"),
            ("model_float16_groups", "shard_fp32_from_float16_groups"),
        )
        of_model = {number: name for number, (name, _) in self.parameters.items()}
        names = dict(of_model)
        for models, mains in pairs:
            groups = zip(getattr(part, models, ()), getattr(part, mains, ()), strict=False)
            for model_group, main_group in groups:
                for model, main in zip(model_group, main_group, strict=False):
                    names[id(main)] = of_model.get(id(model), "?")
        return names

    def _finish_step(self, answer: Any) -> None:
        losses = {name: _plain(value) for name, value in answer[0].items()}
        weights = hashlib.sha256()
        for chunk in self.chunks:
            for _, parameter in sorted(chunk.named_parameters()):
                weights.update(digest(parameter).encode())
        self.steps.append(
            {"losses": losses, "norm": repr(answer[5]), "weights": weights.hexdigest()[:16]}
        )
        if self._number == self.last:
            trace = {"events": self.events, "steps": self.steps}
            self.path.write_text(json.dumps(trace))

    def _hook(self) -> list[Any]:
        handles: list[Any] = []
        for chunk, names in zip(self.chunks, self.names, strict=True):
            for name, module in chunk.named_modules():
                before, after = self._hooks(
                    names[name], root=not name, last=bool(chunk.post_process)
                )
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(module.register_forward_hook(after))
        return handles

    def _hooks(self, name: str, root: bool, last: bool) -> tuple[Any, Any]:
        import torch

        whole = root and last
        name = "loss" if whole else name

        def gradient(slot: str, tensor: Any) -> None:
            of_graph = tensor.requires_grad and torch.is_grad_enabled()
            if of_graph and not isinstance(tensor, torch.nn.Parameter):
                tensor.register_hook(
                    lambda grad: self.note("activation gradients", name, slot, grad)
                )

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for slot, value in (*enumerate(args), *kwargs.items()):
                if isinstance(value, torch.Tensor):
                    if root:
                        self.note("inputs", "model", str(slot), value)
                    else:
                        gradient(f"in.{slot}", value)

        def after(_: Any, __: Any, output: Any) -> None:
            values = output if isinstance(output, (tuple, list)) else (output,)
            for slot, value in enumerate(values):
                if isinstance(value, torch.Tensor):
                    # In a backward pass it is a forward pass that is recomputed.
                    if torch._C._current_graph_task_id() == -1:
                        self.note("loss" if whole else "outputs", name, str(slot), value)
                    gradient(f"out.{slot}", value)

        return before, after


def digest(tensor: Any) -> str:
    """Of its values, bit for bit."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        return repr(tensor)
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def first_difference(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> tuple[str, str]:
    """Stage and name where two runs of one strategy part first, over all ranks; empty if nowhere.

    Of gradients of activations: the module that is given the right gradient and passes on a wrong one.
    """
    for stage in STAGES:
        backward = stage == "activation gradients"
        wrong: dict[str, set[str]] = {}
        order: dict[str, tuple[int, int]] = {}
        for first, two in zip(before, after, strict=True):
            for index, name, slot in _differing(_of_stage(first, stage), _of_stage(two, stage)):
                wrong.setdefault(name, set()).add(slot.partition(".")[0])
                layer = -_layer(name) if backward else _layer(name)
                order[name] = min(order.get(name, (layer, index)), (layer, index))
        if wrong:
            names = sorted(wrong, key=lambda name: order[name])
            return stage, _culprit(names, wrong) if backward else names[0]
    return "", ""


def _of_stage(run: dict[str, Any], stage: str) -> list[Event]:
    return [event for event in run["events"] if event[0] == stage]


def _differing(first: list[Event], two: list[Event]) -> list[tuple[int, str, str]]:
    """Place, name and slot of what differs, or is in one of them alone."""
    hashes = {(event[1], event[2]): event[3] for event in two}
    differences = []
    for index, (_, name, slot, value) in enumerate(first):
        if hashes.pop((name, slot), None) != value:
            differences.append((index, name, slot))
    return differences + [(len(first), name, slot) for name, slot in hashes]


def _layer(name: str) -> int:
    """Where a module is on the way forward: ranks of a pipeline hold different layers."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        return int(parts[2])
    return -1 if parts[0] in ("embedding", "model") else 1_000_000


def _culprit(names: list[str], wrong: dict[str, set[str]]) -> str:
    passing = [name for name in names if wrong[name] == {"in"}]
    inner = (name for name in passing if not any(other.startswith(f"{name}.") for other in passing))
    return next(inner, names[0])


def _unwrapped(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _global_names(chunk: Any) -> dict[str, str]:
    """Each module's dotted name with the global number of its layer, from 0."""
    layers = {
        name: str(module.layer_number - 1)
        for name, module in chunk.named_modules()
        if name.startswith("decoder.layers.") and name.count(".") == 2
    }
    names = {}
    for name, _ in chunk.named_modules():
        parts = name.split(".")
        layer = ".".join(parts[:3])
        names[name] = ".".join((*parts[:2], layers[layer], *parts[3:])) if layer in layers else name
    return names


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
