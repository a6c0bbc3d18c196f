"""Two runs are of one model if no flag of shape or architecture that they state differs."""

import pytest

from parakit.config.strategy import Parallelism, Sharding, strategy_flags
from parakit.logs.stated_model import find_printed_model, find_recorded_model
from tests.reporting.analyse.test_foreign_logs import LOSSES, given, log, rows_of
from tests.reporting.factory import run_record
from tests.reporting.read.test_runs import ARGUMENTS
from tests.reporting.render.test_build import made

SHIFTED = [loss + 0.05 for loss in LOSSES]
OTHER_MODELS = [
    ("ffn_hidden_size", "4608", "4096", "--ffn-hidden-size (4608 | 4096)"),
    ("num_experts", "4", "8", "--num-experts (4 | 8)"),
    ("vocab_size", "50257", "128256", "--vocab-size (50257 | 128256)"),
    ("num_attention_heads", "16", "20", "--num-attention-heads (16 | 20)"),
    ("normalization", "LayerNorm", "RMSNorm", "--normalization (LayerNorm | RMSNorm)"),
    ("rotary_base", "10000", "500000", "--rotary-base (10000 | 500000)"),
    ("untie_embeddings_and_output_weights", "False", "True", "(False | True)"),
]


def report_of(tmp_path, first, two):
    """The second row, the terminal's text and both verdicts of logs with these arguments."""
    paths = (
        log(tmp_path / "a.log", losses=LOSSES, arguments=first),
        log(tmp_path / "b.log", ms=0.9, losses=SHIFTED, arguments=two),
    )
    _, text, folder = made(tmp_path, 400, paths=paths)
    rows = rows_of(folder)
    return rows[1], text, [row["parity"] for row in rows]


@pytest.mark.parametrize(("name", "first", "two", "difference"), OTHER_MODELS)
def test_losses_of_another_model_are_not_judged(tmp_path, name, first, two, difference):
    row, text, verdicts = report_of(tmp_path, given(**{name: first}), given(**{name: two}))
    assert verdicts[1] == "not comparable"
    assert difference in row["parity_detail"]["reason"]
    assert f"loss not comparable: different {row['parity_detail']['reason'][10:]}" in row["notes"]
    assert row["speed"]["per_iteration"] is None
    assert "b.log takes 10% less time per token than sp2 ×2 a.log" in text
    assert "so only times per token are compared" in text
    assert difference in text.partition("The losses of")[0]


def test_another_number_of_key_heads_is_another_model(tmp_path):
    grouped = given(group_query_attention="True", num_query_groups="4")
    row, _, verdicts = report_of(tmp_path, ARGUMENTS, grouped)
    assert verdicts[1] == "not comparable"
    assert row["parity_detail"]["reason"] == "different --num-query-groups (16 | 4)"


def test_a_flag_that_one_log_alone_states_leaves_the_losses_unjudged(tmp_path):
    row, text, verdicts = report_of(tmp_path, ARGUMENTS, given(ffn_hidden_size="4096"))
    assert verdicts[1] == "not comparable"
    assert row["parity_detail"]["reason"] == "a.log does not state --ffn-hidden-size"
    assert "their models may differ: a.log does not state --ffn-hidden-size" in text


def test_iteration_lines_alone_state_no_model(tmp_path):
    _, text, verdicts = report_of(tmp_path, "", "")
    assert verdicts == ["not comparable"] * 2
    assert "do not state their models' shapes, so their losses are not judged" in text
    row, text, verdicts = report_of(tmp_path, ARGUMENTS, "")
    assert "b.log does not state its model's shape, so its losses are not judged" in text
    assert row["notes"] == "loss not comparable: b.log does not state its model's shape"


@pytest.mark.parametrize(
    "changes",
    [
        # What Megatron derives or has as default is the same stated and left out.
        {"ffn_hidden_size": "5120", "normalization": "LayerNorm", "rotary_base": "10000"},
        {"layernorm_epsilon": "0.00001"},
        {"num_experts": "None", "moe_router_topk": "2"},
        # Of no model: padding follows TP, and newer Megatrons ignore the last one.
        {"make_vocab_size_divisible_by": "64", "use_mcore_models": "True"},
    ],
)
def test_what_changes_no_model_is_judged_as_ever(tmp_path, changes):
    _, _, verdicts = report_of(tmp_path, ARGUMENTS, given(**changes))
    assert verdicts == ["reference", "broken@1"]


def test_padding_for_tp_is_no_other_vocabulary():
    def padded(tensor, size):
        split = {"tensor_model_parallel_size": tensor, "padded_vocab_size": size}
        return find_printed_model({"num_layers": "2", **split})

    exact = find_printed_model({"num_layers": "2", "vocab_size": "50257"})
    assert padded("1", "50304").differences(padded("2", "50432")) == []
    assert exact.differences(padded("8", "51200")) == []
    (difference,) = padded("1", "50304").differences(padded("2", "51200"))
    assert (difference.flag, difference.is_known) == ("--vocab-size", True)


def test_a_complete_list_has_megatrons_default_for_what_it_leaves_out():
    names = {f"other_{number}": "1" for number in range(120)} | {"kv_channels": "64"}
    complete = find_printed_model({**names, "num_layers": "2", "hidden_size": "256"})
    other = find_printed_model({**names, "num_layers": "2", "hidden_size": "256", "swiglu": "True"})
    assert [item.is_known for item in complete.differences(other) if item.flag == "--swiglu"] == [
        True
    ]


def test_what_a_strategy_needs_is_no_other_model_of_the_kit():
    split = Parallelism(data=2, sharding=Sharding.FSDP2)
    plain = run_record("a", "dp2")
    argv = (*plain.argv, *strategy_flags(split))
    sharded = run_record("b", "dp2", parallelism=split, argv=argv)
    assert find_recorded_model(plain).differences(find_recorded_model(sharded)) == []


def test_runs_of_the_kit_with_another_width_are_not_judged():
    plain = run_record("a")
    wide = run_record("b", argv=(*plain.argv, "--ffn-hidden-size", "512"))
    (difference,) = find_recorded_model(plain).differences(find_recorded_model(wide))
    assert (difference.flag, difference.reference, difference.other) == (
        "--ffn-hidden-size",
        "256",
        "512",
    )


def test_a_log_without_another_of_its_model_is_compared_with_the_first_of_its_size(tmp_path):
    wide, narrow = given(ffn_hidden_size="5120"), given(ffn_hidden_size="4096")
    named = {"a": wide, "b": narrow, "c": narrow, "d": given(ffn_hidden_size="2048")}
    paths = [log(tmp_path / f"{name}.log", arguments=text) for name, text in named.items()]
    _, _, folder = made(tmp_path, paths=tuple(paths))
    compared = {row["run"]: row["speed"] and row["speed"]["reference"] for row in rows_of(folder)}
    assert compared == {"a.log": None, "b.log": None, "c.log": "b.log", "d.log": "a.log"}
