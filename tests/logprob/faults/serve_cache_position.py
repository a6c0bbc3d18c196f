"""The serving engine's positions are one too large for tokens that it feeds with a cache."""

from transformers.models.gpt2.modeling_gpt2 import GPT2Model

original = GPT2Model.forward


def forward(model, input_ids=None, past_key_values=None, position_ids=None, **options):
    length = past_key_values.get_seq_length() if past_key_values is not None else 0
    if length:
        import torch

        last = model.config.n_positions - 1
        positions = torch.arange(length, length + input_ids.shape[1]) + 1
        position_ids = positions.clamp(max=last).unsqueeze(0).expand_as(input_ids)
    return original(
        model, input_ids, past_key_values=past_key_values, position_ids=position_ids, **options
    )


GPT2Model.forward = forward
