"""`make doctor`: run every check of `parakit.cluster.checks` and print a table; `nodes.py` compares nodes.

`__main__.py` also runs before setup. So, like the checks, it imports the standard library of Python 3.6 alone.
"""
