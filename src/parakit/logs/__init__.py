"""Read logs of training runs, of many trainers and versions, and run folders.

This package decides which runs a log holds, what each line means, why a run failed, and which iterations are
measurements. The lines of each trainer are described in one file of `dialects`. Conclusions from several runs are
drawn in `parakit.reporting`.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.logs.diagnosis import (
        classify_log,
        describe_log_end,
        diagnose_log,
        find_first_error,
    )
    from parakit.logs.dialects import find_iterations
    from parakit.logs.failures import NCCL_TIMEOUT
    from parakit.logs.iterations import (
        EXTRA_METRIC_PREFIX,
        LOG_LINE,
        PRINTED_TOKENS_PER_DEVICE,
        PRINTED_TOKENS_PER_SECOND,
        Iteration,
        IterationTable,
    )
    from parakit.logs.lines import make_printable, split_lines
    from parakit.logs.printed import find_device_in_arguments, find_device_name, parse_printed_spec
    from parakit.logs.runs import (
        Run,
        describe_newest_runs,
        find_run_folders,
        load_folder,
        load_runs,
    )
    from parakit.logs.scrape import scrape_log
    from parakit.logs.sources import read_samples
    from parakit.logs.stated_model import REQUIRED_MODEL_FLAGS, ModelDifference
    from parakit.logs.traces import read_trace_events
    from parakit.logs.training_log import TrainingLog, UnreadableLogError, read_training_logs
    from parakit.logs.window import MAD_TO_SIGMA, robust_spread
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "EXTRA_METRIC_PREFIX",
    "LOG_LINE",
    "MAD_TO_SIGMA",
    "NCCL_TIMEOUT",
    "PRINTED_TOKENS_PER_DEVICE",
    "PRINTED_TOKENS_PER_SECOND",
    "REQUIRED_MODEL_FLAGS",
    "Iteration",
    "IterationTable",
    "ModelDifference",
    "Run",
    "TrainingLog",
    "UnreadableLogError",
    "classify_log",
    "describe_log_end",
    "describe_newest_runs",
    "diagnose_log",
    "find_device_in_arguments",
    "find_device_name",
    "find_first_error",
    "find_iterations",
    "find_run_folders",
    "load_folder",
    "load_runs",
    "make_printable",
    "parse_printed_spec",
    "read_samples",
    "read_trace_events",
    "read_training_logs",
    "robust_spread",
    "scrape_log",
    "split_lines",
]
