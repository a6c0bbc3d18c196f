"""Text to Megatron's `.bin/.idx`: its own script's bytes, faster, in bounded memory, resumable.

Takes JSON lines (plain, gzip, zstd), parquet files or data sets of the hub; gives
`PREFIX_KEY_document.bin`, `.idx` and `.manifest.json`. `source` yields blocks, `pipeline` makes ids of
their documents, `parts` writes them as data sets, which `tools.dataset` joins; `run` ties them together
and `cli` is the command line. Every refusal is a `DatasetError`. No torch.
"""
