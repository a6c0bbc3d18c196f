"""What stops a launch before anything starts or is written."""


class LaunchError(ValueError):
    """One sentence that names the thing, the value and the fix."""
