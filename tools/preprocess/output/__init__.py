"""Encoded blocks onto the disk: numbered parts, then whole data sets under their final names.

A kill at any moment leaves either nothing, or whole parts that the repeated command starts from, or the
finished data sets. `tools.preprocess.run` and the command line use it.
"""
