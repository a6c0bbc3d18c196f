"""A strategy as a picture, from the spec of a run and the planner's closed forms."""
