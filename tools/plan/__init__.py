"""Closed forms for what a configuration holds, sends and takes, and a search over them."""
