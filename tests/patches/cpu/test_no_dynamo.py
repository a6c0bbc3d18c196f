import torch

from megatron_patches.cpu.no_dynamo import remove_decorator, remove_step_decorator, skip_compilation


def test_a_function_stays_what_it_is_called_or_decorated() -> None:
    assert skip_compilation(len) is len
    assert skip_compilation(mode="max-autotune")(len) is len


def test_a_method_that_torch_keeps_the_compiler_off_is_the_method_alone() -> None:
    def method() -> None: ...

    assert remove_decorator(torch._disable_dynamo(method)) is method
    assert remove_decorator(method) is method


def test_a_step_computes_what_torchs_does_without_gradients() -> None:
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
