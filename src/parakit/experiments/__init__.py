"""Experiments: sets of runs that are trained together and compared, as data; README.md is the map."""
