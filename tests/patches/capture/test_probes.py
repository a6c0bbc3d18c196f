import torch
from torch.utils.checkpoint import checkpoint

from megatron_patches.capture.probes import Probes, describe_module, global_names
from parakit.artifacts.capture import CaptureStage, CaptureWriter, TensorKey
from parakit.capturing.sinks import KnownTensors, Recording, RoundingProbe, StoredTensors
from tests.verify.captures import rank


class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([3.0]))

    def forward(self, x):
        return self.weight * x


class Model(torch.nn.Module):
    """Model y = w1·(w0·x) + w0·x, in which the first module's output is used twice."""

    def __init__(self, recompute=False):
        super().__init__()
        self.first, self.second = Inner(), Inner()
        self.recompute = recompute

    def forward(self, x):
        y = self.first(x)
        z = checkpoint(self.second, y, use_reentrant=True) if self.recompute else self.second(y)
        return z + y


def captured(tmp_path, model, x=2.0, forced=None):
    writer = CaptureWriter(tmp_path)
    probes = Probes(
        [model],
        [dict.fromkeys(("",), "model") | {n: n for n in ("first", "second")}],
        Recording(writer, forced),
    )
    probes.begin_micro_batch(0)
    model(torch.tensor([x], requires_grad=True)).sum().backward()
    probes.remove()
    writer.close(rank())
    return StoredTensors(tmp_path, writer.records)


def value(stored, name, slot, stage=CaptureStage.OUTPUTS):
    result = stored.get(TensorKey(stage, name, slot, 0))
    return None if result is None else result.item()


def test_inputs_and_outputs_of_every_module_are_written(tmp_path):
    stored = captured(tmp_path / "c", Model())
    assert [value(stored, "first", slot) for slot in ("input.x", "output")] == [2, 6]
    assert [value(stored, "second", slot) for slot in ("input.x", "output")] == [6, 18]
    assert value(stored, "model", "input.x", CaptureStage.INPUTS) == 2


class WithBias(torch.nn.Module):
    """Linear layer that returns its product and its bias, like Megatron's row-parallel linear."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.tensor([7.0]))

    def forward(self, x):
        return x * 3, self.bias


def test_returned_parameter_is_captured_and_unchanged(tmp_path):
    model = Model()
    model.first = WithBias()
    returned = []

    def forward(x):
        product, bias = model.first(x)
        returned.append(bias)
        return model.second(product + bias)

    model.forward = forward
    stored = captured(tmp_path / "c", model)
    assert [value(stored, "first", f"output.{number}") for number in (0, 1)] == [6, 7]
    assert returned[0] is model.first.bias


def test_gradient_of_a_modules_input_excludes_other_users_of_that_input(tmp_path):
    stored = captured(tmp_path / "c", Model())
    gradients = CaptureStage.ACTIVATION_GRADIENTS
    assert value(stored, "second", "input.x", gradients) == 3
    assert value(stored, "first", "output", gradients) == 4
    assert value(stored, "first", "input.x", gradients) == 12


def test_probes_change_no_gradient_and_are_removed(tmp_path):
    plain, probed = Model(), Model()
    plain(torch.tensor([2.0])).sum().backward()
    captured(tmp_path / "c", probed)
    assert plain.first.weight.grad == probed.first.weight.grad == 8
    assert not any(module._forward_hooks for module in probed.modules())


def test_recomputed_pass_is_captured_in_addition_to_the_first(tmp_path):
    stored = captured(tmp_path / "c", Model(recompute=True))
    backward = CaptureStage.ACTIVATION_GRADIENTS
    assert value(stored, "second", "output") == 18
    assert value(stored, "second", "recomputed.output", backward) == 18
    assert value(stored, "second", "input.x", backward) == 3


def test_forced_input_hides_faults_before_it(tmp_path):
    right = captured(tmp_path / "right", Model())
    wrong = Model()
    wrong.first.weight.data.fill_(5)
    stored = captured(tmp_path / "forced", wrong, forced=right)
    assert value(stored, "first", "output") == 10
    assert value(stored, "second", "input.x") == 10  # The input that arrived is captured.
    assert value(stored, "second", "output") == 18  # The output is computed from the forced input.


def test_forced_gradient_hides_faults_after_it(tmp_path):
    right = captured(tmp_path / "right", Model())
    wrong = Model()
    wrong.second.weight.data.fill_(7)
    stored = captured(tmp_path / "forced", wrong, forced=right)
    assert value(stored, "first", "output", CaptureStage.ACTIVATION_GRADIENTS) == 8
    assert value(stored, "first", "input.x", CaptureStage.ACTIVATION_GRADIENTS) == 12


def test_captured_tensor_can_be_freed(tmp_path):
    tensor = torch.ones(2)
    with CaptureWriter(tmp_path / "c") as writer:
        Recording(writer).forward(TensorKey(CaptureStage.OUTPUTS, "first", "output", 0), tensor)
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0


def test_tensor_in_reused_memory_is_not_taken_for_the_earlier_tensor():
    known, memory = KnownTensors(), bytearray(8)
    first, second = (torch.frombuffer(memory, dtype=torch.float32) for _ in range(2))
    known.note(first, "first")
    assert known.find(second) == "first"
    first.set_()  # The test acts as if the tensor had been freed.
    assert known.find(second) is None


def test_response_is_the_relative_change(tmp_path):
    writer_folder = tmp_path / "c"
    stored = captured(writer_folder, Model())
    responding = RoundingProbe(stored)
    responding.write(TensorKey(CaptureStage.OUTPUTS, "first", "output", 0), torch.tensor([6.03]))
    (response,) = responding.responses.values()
    assert abs(response - 0.005) < 1e-6


class Difference(torch.nn.Module):
    """Module that, like a softmax, ignores a common offset of its inputs."""

    def forward(self, x):
        return x[:1] - x[1:]


def test_perturbed_inputs_give_a_response_where_perturbed_weights_give_none(tmp_path):
    model = torch.nn.Sequential(Inner(), Difference())
    names = [{"": "model", "0": "first", "1": "second"}]
    inputs = torch.tensor([1.0, 1.0078125])

    def watched(sink):
        probes = Probes([model], names, sink)
        probes.begin_micro_batch(0)
        model(inputs)
        probes.remove()

    with CaptureWriter(tmp_path / "c") as writer:
        watched(Recording(writer))
        writer.flush()
        responding = RoundingProbe(StoredTensors(tmp_path / "c", writer.records))
    key = "outputs|second|output"
    epsilon = torch.finfo(torch.float32).eps
    with torch.no_grad():
        model[0].weight.mul_(1 + epsilon)
    watched(responding)
    assert responding.responses[key] < 40 * epsilon
    responding.round_otherwise(0)
    watched(responding)
    assert responding.responses[key] > 60 * epsilon


def test_integers_have_no_rounding_error(tmp_path):
    responding = RoundingProbe(captured(tmp_path / "c", Model()))
    responding.round_otherwise(0)
    site = TensorKey(CaptureStage.OUTPUTS, "first", "input.ids", 0)
    assert responding.forward(site, torch.tensor([3])) is None
    off = responding.forward(site, torch.tensor([6.0] * 64))
    assert off is not None
    apart = (
        4 * torch.finfo(torch.float32).eps
    )  # The perturbation moves the value to the next number.
    assert sorted(set((off - 6).tolist())) == [-apart, apart]


def test_overflow_with_perturbed_weights_is_no_response(tmp_path):
    responding = RoundingProbe(captured(tmp_path / "c", Model()))
    for value in (float("inf"), 6.03):
        responding.write(
            TensorKey(CaptureStage.OUTPUTS, "first", "output", 0), torch.tensor([value])
        )
    (response,) = responding.responses.values()
    assert abs(response - 0.005) < 1e-6


def test_response_of_a_state_includes_its_initial_values(tmp_path):
    gradient = TensorKey(CaptureStage.REDUCED_GRADIENTS, "w", "gradient")
    average, squares = (
        TensorKey(CaptureStage.OPTIMIZER_STATE, "w", name) for name in ("exp_avg", "exp_avg_sq")
    )
    with CaptureWriter(tmp_path / "c") as writer:
        for site in (gradient, average, squares):
            Recording(writer).write(site, torch.tensor([3.0, 4.0]))
        writer.flush()
        responding = RoundingProbe(StoredTensors(tmp_path / "c", writer.records))
    responding.write(gradient, torch.tensor([3.0, 4.05]))  # 0.01 of it.
    responding.write(average, torch.tensor([3.0, 4.05]))
    responding.carry(
        [
            (average, 50.0),
            (squares, 5.0),
            (TensorKey(CaptureStage.OPTIMIZER_STATE, "v", "exp_avg"), 1.0),
        ]
    )
    result = {key.split("|")[2]: round(value, 6) for key, value in responding.responses.items()}
    assert result == {"gradient": 0.01, "exp_avg": 0.11, "exp_avg_sq": 0.02}


def test_layers_and_experts_have_their_global_numbers():
    stage = torch.nn.Module()
    stage.decoder = torch.nn.Module()
    layer = torch.nn.Module()
    layer.experts = torch.nn.Module()
    layer.experts.local_experts = torch.nn.ModuleList([Inner()])
    stage.decoder.layers = torch.nn.ModuleList([layer])
    (names,) = global_names([stage], [2], 4)
    expert_name = "decoder.layers.0.experts.local_experts.0"
    assert (names[expert_name], names[""]) == ("decoder.layers.2.experts.local_experts.4", "model")
    result = describe_module(stage.get_submodule(expert_name))
    assert result.kind == "Inner"
    assert result.source.endswith(f":{Inner.forward.__code__.co_firstlineno}")


class Borrower(torch.nn.Module):
    """Module that calls a submodule of another module once more than its owner does."""

    def __init__(self, lender):
        super().__init__()
        self.own, self.lender = Inner(), [lender]

    def forward(self, x):
        return self.own(self.lender[0](x))


class Lending(torch.nn.Module):
    def __init__(self, lends):
        super().__init__()
        self.first, self.lends = Inner(), lends
        self.borrower = Borrower(self.first)

    def forward(self, x):
        return self.borrower(x if self.lends else self.first(x))


def test_calls_are_numbered_per_caller(tmp_path):
    inputs = []
    for lends in (False, True):
        model, writer = Lending(lends), CaptureWriter(tmp_path / str(lends))
        names = {name: name or "model" for name, _ in model.named_modules()}
        probes = Probes([model], [names], Recording(writer))
        probes.begin_micro_batch(0)
        model(torch.tensor([2.0]))
        writer.close(rank())
        inputs.append(
            {
                (site.slot, site.call)
                for site in writer.records
                if site.name == "first" and "input" in site.slot
            }
        )
    assert inputs[0] == {("input.x", 0), ("input.x@borrower", 0)}
    assert inputs[1] == {("input.x@borrower", 0)}
