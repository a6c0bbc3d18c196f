"""The serving engine reports processed log probabilities, after the temperature 0.7."""

import sys

import torch

serve = sys.modules["__main__"]
serve.report_log_probabilities = lambda logits: torch.log_softmax(logits.float() / 0.7, dim=-1)
