"""The kit's own tools: everything around Megatron, nothing instead of it."""
