from tests.launch.checkpoint.conftest import saved, write  # noqa: F401 - fixtures of these tests too
