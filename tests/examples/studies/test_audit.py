import json
from pathlib import Path

import pytest

from examples.studies.audit import Contradiction, audit
from examples.studies.audit_table import TableError, quantity, read_table
from parakit.cli.dispatch import from_words
from parakit.planner.readings.table import READINGS

BRIDGE = """\
# Llama 3 8B

| #-GPUs | Precision | GPU | GBS | MBS | Seq | TP | PP | CP | VP | Tokens / sec / GPU | Step time (s) |
|:--|:--|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|
| 8 | BF16 | H100 | 128 | 1 | 8,192 | 1 | 1 | 2 | n/a | 13,812 | **9.49** |

Text between.

| Model | GPUs | DP | TP | PP |
| --- | --- | --- | --- | --- |
| tp2pp2 | 8 | 2 | 2 | 2 |
"""


def contradictions(tmp_path: Path, text: str) -> list[Contradiction]:
    file = tmp_path / "table"
    file.write_text(text)
    return list(audit(read_table(file)).contradictions)


def test_a_right_table_says_nothing_and_its_checks_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "table.md"
    file.write_text(BRIDGE)
    found = audit(read_table(file))
    assert found.contradictions == ()
    assert (found.rows, found.unchecked) == (2, 0)
    assert found.checks == 6


@pytest.mark.parametrize(
    ("header", "right", "wrong", "rule", "words"),
    [
        (
            "gpus,tp,pp,cp,dp,mbs,gbs,seq,step time (s),tokens/s",
            "512,4,1,1,128,4,1024,4096,2.094,2003000",
            "512,4,1,1,128,4,1204,4096,2.094,2003000",
            "tokens",
            "a global batch of 1,024",
        ),
        (
            "model,gpus,gbs,seq,step_time_s,tokens/sec",
            "grok1,512,1024,8192,7.324,1145359",
            "grok1,512,1024,8192,7.324,572679",
            "tokens",
            "(x0.50)",
        ),
        ("GPUs,TP/PP/DP", "640,8·8·10", "320,8·8·10", "degrees", "= 640, not the 320 GPUs"),
        ("GPUs,TP,PP", "32,4,8", "16,4,8", "degrees", "= 32 does not divide the 16 GPUs"),
        ("gpus,tp,pp,cp,dp", "64,1,1,16,4", "64,1,1,4,4", "degrees", "= 16, not the 64"),
        (
            "model,tp,pp",
            "mixtral_8x7b_tp1pp4ep8vpp8,1,4",
            "mixtral_8x7b_tp1pp4ep8vpp8,2,4",
            "name",
            "Its name says TP 1, its column 2.",
        ),
        ("gpu,mfu", "H100,54.2%", "H100,154.2%", "mfu", "154.2% is none"),
        ("gpu,dtype,TFLOP/s/GPU", "A100,BF16,252", "A100,BF16,340", "mfu", "above the 312"),
        (
            "gpu,dtype,params (B),tokens/s/GPU",
            "A100,BF16,65,380",
            "A100,BF16,65,1890",
            "mfu",
            "% of the peak",
        ),
        (
            "params (B),tokens/s/gpu,TFLOP/s",
            "7,4000,175",
            "7,4000,57",
            "flops",
            "57 TFLOP/s a GPU, but 4,000 tokens/s of 7 billion parameters are 168 to 224",
        ),
        ("heads,tp,layers,pp", "40,8,32,4", "40,16,32,4", "divisibility", "40 attention heads"),
        ("GPUs,layout", "768,sp8vpp16x6dp6", "64,sp8vpp16x6dp6", "degrees", "= 768, not the 64"),
        ("GPUs,layout", "8,tp2vpp2dp2", "16,tp2vpp2dp2", "degrees", "= 8, not the 16"),
        ("GPUs,TP x PP x DP", "640,8x8x10", "320,8x8x10", "degrees", "= 640, not the 320 GPUs"),
        ("GPUs,TP,PP,DP", "2x8,2,1,8", "2x4,2,1,8", "degrees", "= 16, not the 8 GPUs"),
        ("GPUs,TP,PP,DP", "8,2,1,4", "8,2,1,4.5", "number", "DP is 4.5, no whole number"),
        ("gpu,HFU", "A100,57%", "A100,140%", "mfu", "An HFU of 140% is none"),
        (
            "gpus,gbs,seq,step time (s),tokens/s",
            "8,32,8K,1.0,262.1k",
            "8,32,8K,1.0,65.5k",
            "tokens",
            "is 262,144 tokens/s, not 65,500",
        ),
        (
            "params,gpu,gpus,gbs,seq,step time (s),TFLOP/s/GPU",
            "350M,A100,8,8,2048,0.1,43",
            "350M,A100,8,8,2048,0.1,143",
            "flops",
            "of 0.35 billion parameters are 43 to 57",
        ),
        (
            "params (B),gpus,tokens/s,Total PFLOP/s",
            "7,8,32000,1.6",
            "7,8,32000,16",
            "flops",
            "2000 TFLOP/s a GPU",
        ),
        ("gpus,tp,pp,mbs,gbs", "64,2,2,2,256", "64,2,2,3,256", "divisibility", "256 samples"),
        (
            "gpu,dtype,TFLOP/s/GPU,MFU",
            "A100,BF16,140,45%",
            "A100,BF16,140,52%",
            "mfu",
            "are 44.9% of",
        ),
        ("gpu,TFLOP/s/GPU,MFU", "A100,140,45%", "A100,140,52%", "mfu", "of a A100 in 16 bits, not"),
        ("gpu,TFLOP/s/GPU,MFU", "H100,940,47.5%", "H100,940,60%", "mfu", "in 16 bits, not"),
        (
            "method,step time (s),throughput (samples/s),gbs",
            "ZeRO,1.769,4.52,8",
            "ZeRO,1.769,5.52,8",
            "samples",
            "are a batch of 9.76, not 8.",
        ),
        ("gpus,tp,pp,cp,dp,ep", "32,1,4,2,1,8", "32,1,4,2,1,4", "degrees", "= 8, not the 32 GPUs"),
    ],
)
def test_each_kind_of_contradiction_is_found_and_the_right_row_is_not(
    tmp_path: Path, header: str, right: str, wrong: str, rule: str, words: str
) -> None:
    assert contradictions(tmp_path, f"{header}\n{right}\n") == []
    found = {item.rule: item for item in contradictions(tmp_path, f"{header}\n{wrong}\n")}
    assert found[rule].line == 2
    assert words in found[rule].sentence
    assert len(found) == (2 if "1204" in wrong else 1)  # Which 512 ranks do not divide either.


@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("gpus,gbs,seq,step time (s),tokens/s", "8,32,1024,0,32768"),
        ("gpus,gbs,seq,step time (s),tokens/s", "8,32,0,1,32768"),
        ("gpus,gbs,seq,step time (s),tokens/s", "8,0,1024,1,32768"),
        ("gpus,tp,pp,gbs,mbs", "8,0,1,8,1"),
        ("gpus,tp,pp,ep", "8,1,0,2"),
        ("gpus,tokens/s,params (B),TFLOP/s", "0,8000,7,100"),
        ("gpus,tp,pp,dp", "1e999,2,1,4"),
        ("gpus,tokens/s", "8,-32768"),
    ],
)
def test_what_is_not_above_0_is_named_and_nothing_is_divided_by_it(
    tmp_path: Path, header: str, row: str
) -> None:
    (found,) = contradictions(tmp_path, f"{header}\n{row}\n")
    assert found.rule == "number"


def test_a_0_of_what_a_run_can_do_without_is_no_finding(tmp_path: Path) -> None:
    assert contradictions(tmp_path, "gpus,tp,pp,dp,vpp,ep\n8,2,1,4,0,0\n") == []


def test_cells_that_hold_several_numbers_are_not_stated_and_nothing_is_concluded_from_them(
    tmp_path: Path,
) -> None:
    for tensor in ("2 / 4", "2–4", "1 or 2", "2,4"):
        assert contradictions(tmp_path, f"gpus;tp;pp;dp\n8;{tensor};2;2\n") == []
    assert (
        contradictions(tmp_path, "gpus;gbs;seq;step time (s);tokens/s\n8;64;4096;1,5;174763\n")
        == []
    )


SPEEDUPS = """\
| Method | Iter Time (s) | Throughput (samples/s) | Speedup vs Baseline |
|--------|---------------|------------------------|---------------------|
| **Baseline** | 1.211 | 6.60 | 1.00x |
| **Pipeline** | 0.986 | 8.12 | **1.23x** |
"""
DIFFERENCES = """\
| Metric | Native | Megatron | Difference |
|--------|--------|----------|------------|
| Speed | 4.80 it/s | 4.46 it/s | **+7.6%** |
| Time | 3:28 minutes | 3:44 minutes | -16 seconds |
| Accuracy | 98.74% | 98.64% | +0.10% |
"""
LISTED = """\
Megatron-LM (1024 A100 GPUs):
├─ Throughput: 140 TFLOPS per GPU
├─ Efficiency: 52% of peak

Scaling:
├─ Throughput: 140 TFLOPS per GPU
├─ Efficiency: 92%
"""


@pytest.mark.parametrize(
    ("text", "right", "wrong", "sentence"),
    [
        (SPEEDUPS, "1.23x", "1.32x", "is 1.23 times as good as the baseline's, not 1.32."),
        (SPEEDUPS, "8.12", "9.12", "a batch of 8.99, and the baseline's 7.99."),
        (DIFFERENCES, "+7.6%", "+8.6%", "4.8 and 4.46 are 0.34 apart, not +8.6%."),
        (LISTED, "52%", "52%", "140 TFLOP/s are 44.9% of the 312 of a A100 in 16 bits"),
    ],
)
def test_write_ups_tables_of_speedups_differences_and_listed_figures_are_read(
    tmp_path: Path, text: str, right: str, wrong: str, sentence: str
) -> None:
    if right != wrong:
        assert contradictions(tmp_path, text) == []
    assert sentence in contradictions(tmp_path, text.replace(right, wrong))[0].sentence


def test_checks_that_were_not_made_are_listed_with_what_their_rows_lack(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("gpus,tp,gbs,tokens/s\n8,2,16,100\n8,,16,\n")
    skipped = audit(read_table(file)).skipped
    assert skipped["degrees"] == {"TP or PP": 1}
    assert skipped["tokens"] == {"sequence length": 1, "tokens/s or tokens/s/GPU": 1}


def test_bars_and_links_inside_a_cell_are_text(tmp_path: Path) -> None:
    header = "| a \\| b | # of GPUs | TP Size | PP | DP |\n|-|-|-|-|-|\n"
    table = f"{header}| [70B](x_y) \\| c | 16 | 2 | 2 | 2 |"
    (found,) = contradictions(tmp_path, table)
    assert found.sentence == "TP 2 x PP 2 x DP 2 = 8, not the 16 GPUs stated."


def test_the_wrong_tables_among_the_public_readings_are_found() -> None:
    found = audit(read_table(READINGS)).contradictions
    wrong = {(item.row, item.rule) for item in found}
    assert ("grok1-314b", "tokens") in wrong
    assert ("gpt-18b", "degrees") in wrong  # BigScience: TP 4, PP 8 on 16 GPUs.
    assert ("mixtral:mixtral_8x7b_tp1pp4ep8vpp8_release", "name") in wrong
    assert sum(item.rule == "degrees" and item.row == "llama3-8b" for item in found) >= 8
    assert len({item.line for item in found}) < 60  # Of 3,300 lines.


def test_headings_are_known_in_the_spellings_of_public_tables() -> None:
    spellings = {
        "#-GPUs": "gpus",
        "Training step time (seconds per step)": "step_s",
        "Model TFLOP / sec / GPU": "tflops",
        "Tokens / sec / GPU": "tokens_s_gpu",
        "Throughput in tokens per second": "tokens_s",
        "Time per iteration (ms)": "step_ms",
        "MFU (%)": "mfu",
        "Pipeline parallel": "pp",
        "TP·PP·DP": "tp pp dp",
        "Global batch size (samples)": "gbs",
        "Batch (tokens)": "",
        "Sequence length (tokens)": "seq",
        "Throughput (k tokens/s)": "",
        "TP degree": "tp",
        "Release notes of a vendor": "",
    }
    assert {text: quantity(text) for text in spellings} == spellings


def test_the_command_ends_with_a_summary_and_a_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t.csv"
    file.write_text("model,gpus,layout\nmine,16,tp4pp8\n")
    assert from_words("audit", [str(file)], "parakit audit") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{file}:2: mine: TP 4 x PP 8 = 32 does not divide the 16 GPUs stated."
    assert lines[1] == "1 rows, 1 checks: 1 of them contradict themselves."
    assert lines[2].startswith("Not checked, in rows: divisibility (1 without ")
    assert from_words("audit", ["--json", str(file)], "parakit audit") == 1
    assert json.loads(capsys.readouterr().out)["contradictions"][0]["rule"] == "degrees"
    file.write_text("fruit,colour\napple,red\n")
    assert from_words("audit", [str(file)], "parakit audit") == 2
    assert "holds no table of performance figures" in capsys.readouterr().err
    with pytest.raises(TableError, match=r"nowhere\.csv cannot be read"):
        read_table(tmp_path / "nowhere.csv")
