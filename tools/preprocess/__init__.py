"""Text to Megatron's `.bin/.idx`: its own script's bytes, faster, in bounded memory, resumable.

What it takes and gives, and which module decides what, is in README.md. No torch.
"""
