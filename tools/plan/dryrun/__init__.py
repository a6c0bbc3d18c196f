"""Megatron's own training iteration for any rank of any world, with tensors that have no contents."""
