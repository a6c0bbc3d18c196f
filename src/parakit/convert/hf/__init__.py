"""Convert weights between Hugging Face and Megatron's checkpoints, without a GPU.

`families` is the only table of tensor names and reshapings. `tensor_files` reads and writes safetensors,
`checkpoint` writes Megatron's distributed format; both hold one tensor at a time. `into_megatron` and
`from_megatron` are the two commands. `reference` trains the same model with `transformers`, for
`make verify-hf`.
"""
