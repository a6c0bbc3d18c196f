"""Refuses `python -m tools.cli`, which is `parakit` now."""

from tools.renamed import refuse

if __name__ == "__main__":
    refuse("cli")
