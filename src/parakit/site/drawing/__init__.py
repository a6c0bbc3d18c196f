"""Drawings of a strategy as pictures, from the spec of a run and the closed forms of the planner."""
