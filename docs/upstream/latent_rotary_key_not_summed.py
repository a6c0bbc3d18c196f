"""Cures latent-rotary-key-not-summed: in backward, ranks' gradients of MLA's rotary key are summed."""

import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

project_down = MLASelfAttention._qkv_down_projection


def with_whole_key(self, hidden_states):
    queries, latent = project_down(self, hidden_states)
    sizes = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
    if latent.size(-1) == sum(sizes):  # A duplicated linear, as with Transformer Engine.
        return queries, latent
    latent = mappings.gather_from_tensor_model_parallel_region(latent)
    if self.config.sequence_parallel:
        # The caller gathers the rotary part again, and that gather sums in backward.
        return queries, mappings.scatter_to_sequence_parallel_region(latent)
    compressed, rotary = torch.split(latent, sizes, dim=-1)
    rotary = mappings.copy_to_tensor_model_parallel_region(rotary)
    return queries, torch.cat([compressed, rotary], dim=-1)


MLASelfAttention._qkv_down_projection = with_whole_key
