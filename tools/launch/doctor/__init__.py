"""`make doctor`: every check of `tools.launch.checks` as a table; `nodes.py` compares a cluster's nodes.

`__main__.py` also runs before setup: like the checks, it is Python 3.6's standard library alone.
Nothing imports from here.
"""
