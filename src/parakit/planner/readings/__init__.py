"""Published figures of training time and memory, and how far the planner's formulas miss each.

`table` reads them, `reading_to_spec` makes a `RunSpec` and a cluster of each, `residual` predicts it,
`summary` and `page` say how far off; `neighbours` and `intervals` have the errors of readings like a
plan, `local_readings` one's own runs. The rest of the planner, report and launch import it.
"""
