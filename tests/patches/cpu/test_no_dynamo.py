import torch

from megatron_patches.cpu.no_dynamo import remove_decorator, remove_step_decorator, skip_compilation


def test_compile_returns_the_function_itself_when_called_or_used_as_decorator() -> None:
    assert skip_compilation(len) is len
    assert skip_compilation(mode="max-autotune")(len) is len


def test_decorator_that_excludes_a_method_from_compilation_is_removed() -> None:
    def method() -> None: ...

    assert remove_decorator(torch._disable_dynamo(method)) is method
    assert remove_decorator(method) is method


def test_step_without_compiler_equals_torchs_step_without_gradients() -> None:
    def trained(step: object) -> tuple[torch.Tensor, bool]:
        weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        weight.grad = torch.tensor([0.5, 3.0])
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        step(optimizer)  # type: ignore[operator]
        return weight.detach(), torch.is_grad_enabled()

    plain, patched = (
        trained(torch.optim.Adam.step),
        trained(remove_step_decorator(torch.optim.Adam.step)),
    )
    assert torch.equal(plain[0], patched[0])
    assert patched[1] is plain[1] is True
