"""Score tokens with Megatron in place of training: `make verify-logprob`."""
