"""Published figures of training time and memory, and how far the planner's formulas miss each.

`table` reads them, `express` makes a `RunSpec` and a cluster of each, `residual` predicts it, `summary`
and `page` say how far off; `fit` finds the constants, `near` the error of readings like a plan, `own`
adds one's own runs. The rest of the planner, report and launch import it.
"""
