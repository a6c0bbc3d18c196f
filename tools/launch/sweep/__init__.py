"""Sizes against devices: every legal cell of models × strategies × backends × devices, measured."""
