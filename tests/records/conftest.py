from tests.launch.checkpoint.conftest import saved  # noqa: F401 - a fixture of these tests too
