"""What can go wrong, each as one sentence that names the thing, the value and the remedy."""


class PreprocessError(Exception):
    """The command line prints the message and exits with 1."""


class DatasetError(PreprocessError):
    """A data set on disk is missing, damaged or not what its manifest says."""
