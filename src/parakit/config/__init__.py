"""What a run consists of: Megatron's flags, a model's shape, a strategy's parallel sizes, jobs and
hardware.

This package defines how each of these is written, parsed and named in the whole kit. It computes no
costs and starts nothing. Its modules are public, and `settings` lists every variable of make.
"""

__all__ = [
    "errors",
    "experts",
    "files",
    "flag_table",
    "flags",
    "groups",
    "hardware",
    "huggingface",
    "model",
    "offload",
    "published",
    "recompute",
    "replacing",
    "run",
    "setting",
    "settings",
    "stages",
    "strategy",
    "variable_groups",
    "variables",
]
