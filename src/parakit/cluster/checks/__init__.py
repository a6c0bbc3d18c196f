"""What a machine has and lacks: checks that `make doctor` prints and that the preflight raises.

Each check returns a `CheckResult`, or several: what was found, whether it stops anything, and the fix.
Standard library of Python 3.6 alone, because the doctor runs before setup. So no module here may import
from the rest of the kit, nor use what newer Pythons brought: annotations that 3.6 cannot evaluate are
written as strings. What only the kit's packages can measure (GPUs through NVML, rates through torch),
`.venv`'s Python is asked for as JSON. Any module of `parakit.launch` may import from here.
"""
