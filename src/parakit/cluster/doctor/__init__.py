"""`make doctor`: every check of `parakit.cluster.checks` as a table; `nodes.py` compares nodes.

`__main__.py` also runs before setup: like the checks, it is Python 3.6's standard library alone.
"""
