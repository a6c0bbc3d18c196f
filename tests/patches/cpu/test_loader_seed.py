import torch
from torch.utils.data import DataLoader

from megatron_patches.cpu.loader_seed import _preserve_rng_state


def test_data_loader_does_not_use_the_random_generator_of_dropout() -> None:
    loader = DataLoader([1, 2, 3])
    torch.manual_seed(7)
    untouched = torch.get_rng_state()
    iter(loader)
    assert not torch.equal(
        torch.get_rng_state(), untouched
    )  # Unpatched torch draws from the generator.
    torch.manual_seed(7)
    batches = _preserve_rng_state(DataLoader.__iter__)(loader)
    assert torch.equal(torch.get_rng_state(), untouched)
    assert len(list(batches)) == 3
