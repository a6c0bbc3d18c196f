"""Seconds of an iteration, in closed form, on a cluster known by datasheets and a few constants."""
