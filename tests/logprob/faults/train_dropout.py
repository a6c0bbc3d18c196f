"""The trainer computes log probabilities without switching dropout off."""

import torch

torch.nn.Module.eval = lambda module: module.train()
