"""Text to Megatron's `.bin/.idx`: its own script's bytes, faster, bounded, resumable."""
