"""What runs amount to: takes `Run`s and published figures, gives a `Report` of rows and verdicts.

Pools repeats, estimates medians and intervals, compares speed, losses and published figures. Renders
nothing. `explain`, `render` and the launcher's experiments import it; it imports `read` alone.
"""
