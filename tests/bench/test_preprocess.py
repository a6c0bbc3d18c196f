import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.preprocess import Rate, ToolComparison, describe, main
from tests.bench.synthetic_text import synthetic_documents, unseen_documents


@pytest.mark.slow
def test_bench_measures_this_tool_and_hugging_face_tokenizers(capsys, monkeypatch):
    monkeypatch.delenv("MEGATRON_LM", raising=False)
    assert main(["--mb", "0.2", "--repeats", "2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["ours"]) == 2
    assert data["tokenizers"]["megabytes_per_second"] > 0
    assert data["tokenizers"]["processor_seconds"] > 0
    assert data["megatron"] is None


def test_ratios_are_printed_with_the_median(capsys):
    comparison = ToolComparison(
        input_bytes=100_000_000,
        threads=2,
        ours=(Rate(80, 2), Rate(100, 2), Rate(50, 4)),
        ceiling_megabytes_per_second=160,
        tokenizers=Rate(8, 20),
        megatron=Rate(4, 40),
        same_bytes=True,
    )
    text = "\n".join(describe(comparison))
    assert "100 MB of JSON lines, 2 cores" in text
    assert "80.0 MB/s" in text
    assert "median of 3, 50.0 to 100.0" in text
    assert "10.0 times as fast (10.0 by processor time)" in text
    assert "20.0 times as fast (20.0 by processor time), same bytes" in text
    assert "160.0 MB/s; 50% of it reached" in text
    assert "set MEGATRON_LM" in "\n".join(describe(replace(comparison, megatron=None)))


def test_a_folder_that_is_no_checkout_is_refused(tmp_path, capsys):
    assert main(["--mb", "0.1", "--megatron-lm", str(tmp_path)]) == 1
    assert "holds no tools/preprocess_data.py" in capsys.readouterr().err


@pytest.mark.slow
def test_output_has_the_same_bytes_as_that_of_the_megatron_script(capsys):
    checkout = os.environ.get("MEGATRON_LM")
    if not checkout or not (Path(checkout) / "tools" / "preprocess_data.py").is_file():
        pytest.skip("set MEGATRON_LM to a Megatron-LM checkout")
    assert main(["--mb", "128", "--megatron-lm", checkout, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["same_bytes"]


def test_a_checkout_whose_tokenizer_cannot_be_loaded_is_refused_before_anything_runs(
    tmp_path, capsys
):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/preprocess_data.py").touch()
    assert main(["--mb", "1", "--megatron-lm", str(tmp_path)]) == 1
    assert "reads GPT-2's tokenizer with the package transformers" in capsys.readouterr().err


def test_english_text_is_deterministic_and_has_the_requested_size():
    first, again = list(synthetic_documents(50_000, 3)), list(synthetic_documents(50_000, 3))
    assert first == again
    assert 50_000 <= sum(map(len, first)) < 120_000
    assert first != list(synthetic_documents(50_000, 4))


def test_unseen_text_never_repeats_a_word():
    tokens = " ".join(unseen_documents(200_000)).replace("，", " ").replace("、", " ").split()
    long = [word for word in tokens if len(word) > 4]
    assert len(long) > 3000
    assert len(set(long)) > 0.99 * len(long)
