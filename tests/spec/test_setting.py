from contextlib import suppress

import pytest

from tools.spec import settings
from tools.spec.run import Backend, Recompute
from tools.spec.setting import SettingError, read, values


def test_a_value_is_of_its_kind_or_the_refusal_names_variable_value_and_kind() -> None:
    assert read(settings.ITERS, "5") == 5
    assert read(settings.EXTRA, "--lr '1 e'") == ("--lr", "1 e")
    assert read(settings.BACKEND, "native") is Backend.NATIVE
    with pytest.raises(SettingError, match="ITERS=0 is not a whole number above 0"):
        read(settings.ITERS, "0")
    with pytest.raises(SettingError, match="LAUNCHER=pbs is not torchrun or slurm"):
        read(settings.LAUNCHER, "pbs")
    with pytest.raises(
        SettingError, match="MASTER_PORT=80 is not a whole number from 1024 to 65535"
    ):
        read(settings.MASTER_PORT, "80")


def test_a_variable_that_is_not_set_has_its_default() -> None:
    found = values((settings.SEED, settings.DATA, settings.RANKS), {"SEED": "", "DATA": "owt-ds/x"})
    assert found == {"seed": 1234, "data": "owt-ds/x", "ranks": "first,last"}
    recompute = settings.RECOMPUTE._replace(default="full")
    assert values((recompute,), {}) == {"recompute": Recompute.FULL}


@pytest.mark.parametrize("setting", settings.SETTINGS, ids=lambda setting: setting.name)
def test_every_kind_can_be_read_or_refused(setting: settings.Setting) -> None:
    with suppress(SettingError):
        read(setting, "?")
