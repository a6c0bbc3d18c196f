"""What a run leaves on disk: the contract between those who write run folders and those who read them.

Frozen dataclasses, JSON through msgspec, atomic writes and locks. Imports `parakit.config` and no torch;
everything may import it.
"""
