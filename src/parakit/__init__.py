"""parakit: plan, train, measure and verify ways to split a model over devices.

The names in `__all__` are the public Python API. Each name is imported on first use, so that `import parakit`
loads neither torch nor numpy.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.api import (
        compare_captures,
        estimate,
        inspect_checkpoint,
        plan,
        read_logs,
        report,
        why_hang,
    )
    from parakit.capturing import capture
    from parakit.logprob import record_tokens
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "capture",
    "compare_captures",
    "estimate",
    "inspect_checkpoint",
    "plan",
    "read_logs",
    "record_tokens",
    "report",
    "why_hang",
]
