"""Checks of what a machine has and lacks. `make doctor` prints them, and the preflight of a run raises them.

A check returns a `CheckResult`, or several: what was found, whether that stops a run, and the fix.

The modules import nothing but the standard library of Python 3.6, because the doctor runs before setup. So they
import nothing from the rest of the kit but `parakit.config.reachable`, which runs there too, and write annotations
that 3.6 cannot evaluate as strings. Measurements
that need the kit's packages (GPUs through NVML, rates through torch) are made by `.venv`'s Python, which prints
them as JSON. Any module of `parakit.launch` may import from here.
"""
