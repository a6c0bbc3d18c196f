"""The package's one refusal."""


class PreprocessError(Exception):
    """One sentence that names the thing, the value and the remedy; the command exits with 1."""
