"""Text to Megatron's `.bin/.idx`: its own script's bytes, faster, in bounded memory, resumable.

Takes JSON lines (plain, gzip, zstd), parquet files or data sets of the hub; gives
`PREFIX_KEY_document.bin`, `.idx` and `.manifest.json`. `input` yields blocks of documents, `encode`
makes ids of them, `output` writes parts and joins them, `dataset` knows the finished files; `run` ties
them together and `cli` is the command line. Of the kit it uses only `tools.records`, and no torch.
Whoever trains imports `tools.preprocess.dataset`; the rest is for the command line.
"""
