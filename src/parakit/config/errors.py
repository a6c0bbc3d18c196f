"""The error that stops a launch before anything is started or written."""


class LaunchError(ValueError):
    """A launch that is refused; the message is one sentence that names the thing, the value and the
    fix.
    """
