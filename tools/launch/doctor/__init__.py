"""`make doctor`: what this machine can do. Standard library of Python 3.6 alone; it runs before setup.

So no module here may import from the rest of the kit, nor use what newer Pythons brought: annotations
that 3.6 cannot evaluate are written as strings.
"""
