"""`python -m parakit plan [COMMAND] --model gpt2-large --gpus 2 --gpu h200`: the planner's commands."""

from parakit.cli.main import run_tool
from parakit.formatting.terminal import exit_with


def main(words: list[str] | None = None) -> int:
    """Run a command; its exit code, 2 if it was refused."""
    return run_tool("parakit.planner", words, usual="plan")


if __name__ == "__main__":
    exit_with(main)
