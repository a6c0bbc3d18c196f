"""What can go wrong, each as one sentence that names the thing, the value and the remedy."""


class PreprocessError(Exception):
    """Base of all; the command line prints the message and exits with 1."""


class DatasetError(PreprocessError):
    """A data set on disk is missing, damaged or not what its manifest says."""


class TokenizerError(PreprocessError):
    """A tokenizer cannot be loaded or lacks what a flag needs."""


class InputError(PreprocessError):
    """An input cannot be read, or one of its documents cannot be used."""


class OutputError(PreprocessError):
    """An output exists already, belongs to another run, or cannot be written."""
