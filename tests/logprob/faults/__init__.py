"""Faults of trainers and serving engines, which `tests.logprob.injected` lets `verify-logprob` explain."""
