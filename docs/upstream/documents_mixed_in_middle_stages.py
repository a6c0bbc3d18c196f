"""Cures documents-mixed-in-middle-stages: every pipeline stage reads the batch, and so the mask."""

import sys

NAME = "is_first_or_last_pipeline_stage"

for module in list(sys.modules.values()):
    if NAME in vars(module):
        setattr(module, NAME, lambda vp_stage=None: True)
