"""`python -m parakit COMMAND …`, which is the same program as `parakit`."""

from parakit.formatting.terminal import exit_with


def main() -> int:
    """Run the command line and return its exit code.

    The import is inside of the function, so that Ctrl-C ends the imports in the same way as a command.
    """
    from parakit.cli import main as run

    return run()


if __name__ == "__main__":
    exit_with(main)
