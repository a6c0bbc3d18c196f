"""Compare the log probabilities of a trainer and of a serving engine, and find the causes of their gap.

This package is arithmetic on log probabilities, and the formats in which processes exchange them. It runs no model.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.logprob.explain import GapExplanation, GapStep, find_steps, read_explanation
    from parakit.logprob.gap import Gap, TokenLogProbabilities, measure_gap, subtract
    from parakit.logprob.hypotheses import FAMILIES, CauseKind, split_hypothesis, state_cause
    from parakit.logprob.record import read_recorded_tokens, record_tokens
    from parakit.logprob.request import (
        EXPLAINED_FILE,
        GENERATED_FOLDER,
        SCORES_FILE,
        SEQUENCES_FILE,
        TEXTS_FILE,
        WHOLE_FOLDER,
        ScoreRequest,
        Task,
        read_request,
    )
    from parakit.logprob.verdict import (
        Cause,
        FirstModule,
        GapChange,
        LogprobVerdict,
        ModuleSide,
        price_causes,
    )
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "EXPLAINED_FILE",
    "FAMILIES",
    "GENERATED_FOLDER",
    "SCORES_FILE",
    "SEQUENCES_FILE",
    "TEXTS_FILE",
    "WHOLE_FOLDER",
    "Cause",
    "CauseKind",
    "FirstModule",
    "Gap",
    "GapChange",
    "GapExplanation",
    "GapStep",
    "LogprobVerdict",
    "ModuleSide",
    "ScoreRequest",
    "Task",
    "TokenLogProbabilities",
    "find_steps",
    "measure_gap",
    "price_causes",
    "read_explanation",
    "read_recorded_tokens",
    "read_request",
    "record_tokens",
    "split_hypothesis",
    "state_cause",
    "subtract",
]
