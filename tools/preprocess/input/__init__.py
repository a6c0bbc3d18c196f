"""What `--input` names, read as blocks of whole documents: JSON lines, archives, tables, the hub.

Takes paths and flags, gives `Source`: blocks that can be entered anywhere, and the rules for what a
document is. Everything above it reads through `Source`.
"""
