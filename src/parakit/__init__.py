"""parakit: what each way of splitting a model over devices costs, planned, trained, measured and verified.

Names are imported on first use, so that `import parakit` loads neither torch nor numpy.
"""

__all__ = ["capture"]


def __getattr__(name):  # type: (str) -> object
    if name == "capture":
        from parakit.capturing import capture

        return capture
    raise AttributeError(f"module 'parakit' has no attribute '{name}'")
