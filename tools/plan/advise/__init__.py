"""`make advise`: what to use on one's own devices, in ten answers, each from the planner's figures.

Takes the options of `make plan`, prints them or gives them as JSON.
"""
