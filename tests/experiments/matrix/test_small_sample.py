"""The sample in a small vocabulary has the same documents with folded tokens and ends of documents."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from parakit.config.flags import Flags
from parakit.config.model import GPT2_VOCABULARY, load_model
from parakit.config.run import DeviceKind
from parakit.data.indexed import DocumentIndex, open_dataset, write_index
from parakit.launch import data
from parakit.launch.compose import compose_launch
from parakit.launch.data import SMALL_SAMPLE
from parakit.launch.job import Job
from parakit.launch.options import Options


def test_tokens_are_folded_into_the_small_vocabulary_and_ends_of_documents_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "ROOT", tmp_path)
    whole = tmp_path / data.SAMPLE
    whole.parent.mkdir()
    end = GPT2_VOCABULARY - 1
    np.array([5, 1023, 2047, end, 1022, end], np.uint16).tofile(whole.with_suffix(".bin"))
    write_index(
        whole.with_suffix(".idx"),
        "uint16",
        lambda: [DocumentIndex(np.array([4, 2], np.int32), np.array([0, 1, 2], np.int64))],
    )
    data.make_sample(SMALL_SAMPLE, Console(file=io.StringIO()))
    small = open_dataset(tmp_path / SMALL_SAMPLE)
    assert np.concatenate(list(small.token_chunks())).tolist() == [5, 0, 1, 1023, 1022, 1023]
    assert small.documents == 2


@pytest.mark.parametrize(("version", "vocabulary"), [("0.19.0", "1024"), ("0.16.1", "1023")])
def test_vocabulary_flag_in_extra_depends_on_the_megatron_version(
    version: str, vocabulary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parakit.launch.code.importlib.metadata.version", lambda _: version)
    options = Options(data=SMALL_SAMPLE, extra=("--vocab-size", "1024"), runs=tmp_path)
    job = Job("baseline", load_model("gpt2-tiny"), 1, DeviceKind.CPU, options, script_flags=())
    launch = compose_launch(job)
    assert Flags(launch.flags).text("--vocab-size") == vocabulary
    assert launch.model.shape.vocabulary == 1024
