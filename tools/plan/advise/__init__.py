"""`make advise`: what to use on one's own devices, in ten answers, each from the planner's figures."""
