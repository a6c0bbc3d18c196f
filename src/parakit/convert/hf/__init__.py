"""Weights of Hugging Face's GPT-2 and Llama from and to Megatron's checkpoints, without a GPU.

`families` is the one table of names and reshapings; `tensor_files` reads and writes safetensors and
`checkpoint` writes Megatron's distributed format, both a tensor at a time; `into_megatron` and
`from_megatron` are the two commands; `reference` trains the same model with `transformers`, for the
proof.
"""
