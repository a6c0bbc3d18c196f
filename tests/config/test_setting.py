from contextlib import suppress
from pathlib import Path

import pytest

from parakit.config import settings
from parakit.config.recompute import Recompute
from parakit.config.run import Backend
from parakit.config.setting import SettingError, parse_setting, parse_settings


def test_invalid_value_is_refused_with_variable_value_and_kind() -> None:
    assert parse_setting(settings.ITERS, "5") == 5
    assert parse_setting(settings.EXTRA, "--lr '1 e'") == ("--lr", "1 e")
    assert parse_setting(settings.BACKEND, "native") is Backend.NATIVE
    with pytest.raises(SettingError, match="ITERS=0 is not a whole number above 0"):
        parse_setting(settings.ITERS, "0")
    with pytest.raises(SettingError, match="LAUNCHER=pbs is not torchrun or slurm"):
        parse_setting(settings.LAUNCHER, "pbs")
    with pytest.raises(
        SettingError, match="MASTER_PORT=80 is not a whole number from 1024 to 65535"
    ):
        parse_setting(settings.MASTER_PORT, "80")


def test_megatron_deepspeed_is_refused_by_name_as_a_backend_and_as_a_checkout(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        SettingError, match=r"BACKEND=megatron-deepspeed is a fork .* BACKEND=deepspeed"
    ):
        parse_setting(settings.BACKEND, "megatron-deepspeed")
    with pytest.raises(
        SettingError, match=r"BACKEND=DataParallel is torch.nn.DataParallel, .*=native"
    ):
        parse_setting(settings.BACKEND, "DataParallel")
    entry = tmp_path / "pretrain_gpt.py"
    entry.write_text("import torch\nimport deepspeed\n")
    with pytest.raises(SettingError, match="is Megatron-DeepSpeed, a fork of an older Megatron-LM"):
        parse_setting(settings.MEGATRON_LM, str(tmp_path))
    entry.write_text("import torch\n")
    assert parse_setting(settings.MEGATRON_LM, str(tmp_path)) == tmp_path


def test_a_variable_that_is_not_set_has_its_default() -> None:
    values = parse_settings(
        (settings.SEED, settings.DATA, settings.RANKS), {"SEED": "", "DATA": "owt-ds/x"}
    )
    assert values == {"seed": 1234, "data": "owt-ds/x", "ranks": "first,last"}
    recompute = settings.RECOMPUTE._replace(default="full")
    assert parse_settings((recompute,), {}) == {"recompute": Recompute.FULL}


@pytest.mark.parametrize("setting", settings.SETTINGS, ids=lambda setting: setting.name)
def test_every_kind_can_be_read_or_refused(setting: settings.Setting) -> None:
    with suppress(SettingError):
        parse_setting(setting, "?")


def test_data_set_is_accepted_by_name_prefix_or_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parakit.config.setting.ROOT", tmp_path)
    (tmp_path / "owt-ds").mkdir()
    for name in ("mine_text_document", "joined"):
        (tmp_path / "owt-ds" / f"{name}.idx").touch()
    made = "owt-ds/mine_text_document"
    elsewhere = str(tmp_path / made)
    for text in ("mine", "owt-ds/mine", made, f"{made}.idx", f"{made}.bin", "mine_text_document"):
        assert parse_setting(settings.DATA, text) == made
    assert parse_setting(settings.DATA, elsewhere.removesuffix("_text_document")) == elsewhere
    assert parse_setting(settings.DATA, "joined") == "owt-ds/joined"
    assert parse_setting(settings.DATA, "sample") == "owt-ds/sample_text_document"
    assert parse_setting(settings.DATA, "owt-ds/not-there") == "owt-ds/not-there"
