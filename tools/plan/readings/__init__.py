"""Published figures of training time and memory, and how far the planner's formulas miss each."""
