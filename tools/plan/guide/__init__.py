"""`python -m tools.plan guide`: the figures that the guide and the lab guides copy, computed anew."""
