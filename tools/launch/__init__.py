"""One run, from what was asked to a complete run folder: compose, check, start, watch, record.

Takes make's variables (`options`) and a target, gives a run folder and an exit code; `__main__` is the
command line. The top of the kit: it may import every package below, and none imports it. Of its own
packages `checks`, `checkpoint`, `container`, `supervise` and `cluster` lie below what composes and
executes runs, `experiment` and `matrix` above.
"""
