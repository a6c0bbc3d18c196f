"""`python -m parakit COMMAND …`, which is the same program as `parakit`."""

from parakit.formatting.terminal import exit_with


def main() -> int:
    """Run the command line; the import is here, so that Ctrl-C ends imports as it ends a command."""
    from parakit.cli import main as run

    return run()


if __name__ == "__main__":
    exit_with(main)
