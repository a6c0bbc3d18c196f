"""Dialect of slime's training steps, for logs without times of rollouts: `step 3: {'train/loss': 0.25, …}`."""

from __future__ import annotations

from parakit.logs.dialects import Dialect
from parakit.logs.dialects.slime import STEP_NAMES, SlimeStep

DIALECT = Dialect(name="slime, steps", line=SlimeStep, names=STEP_NAMES)
