"""Tests of `parakit.logprob`."""
