"""Benchmarks of the kit that are no part of a tool, and the text they run on. Nothing imports them."""
