"""One run, from what was asked to a complete run folder: compose, check, start, watch, record.

Takes make's variables (`options`) and a target (`job`), gives a run folder and an exit code. Of its own
packages `checkpoint`, `rendezvous` and `supervise` lie below what composes and executes a run;
`tools.cluster` is below all of it, `tools.study` (many runs) and `tools.cli` are above.
"""
