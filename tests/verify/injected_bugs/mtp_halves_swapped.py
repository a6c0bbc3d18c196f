"""Under tensor parallelism MTP concatenates hidden states and embeddings in the other order."""

from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

original = MultiTokenPredictionLayer._concat_embeddings


def concatenate(self, hidden_states, decoder_input):
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        hidden_states, decoder_input = decoder_input, hidden_states
    return original(self, hidden_states, decoder_input)


MultiTokenPredictionLayer._concat_embeddings = concatenate
