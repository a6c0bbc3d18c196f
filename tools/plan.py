"""Refuses `python -m tools.plan`, which is `parakit` now."""

from tools.renamed import refuse

if __name__ == "__main__":
    refuse("plan")
