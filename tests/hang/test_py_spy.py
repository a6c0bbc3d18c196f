"""Stacks as `py-spy dump` prints them: real runs of a gloo job (0.4.1) and of a plain script (0.3.14).

The name of the script's package is replaced by Megatron's, and torch's own threads are left out.
"""

from pathlib import Path

from parakit.hang.evidence import Frame
from parakit.hang.gather import gather_evidence
from parakit.hang.place import is_outside_training, locate_frames
from parakit.hang.texts import is_stacks, read_stacks
from parakit.hang.verdict import judge_hang
from parakit.hang.waits import is_in_collective

IN_ALL_REDUCE = """Process 25505: python work.py 0
Python v3.12.1 (/usr/bin/python3.12)

Thread 25505 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:4181)
    wrapper (torch/distributed/c10d_logger.py:83)
    train_step (megatron/training/training.py:1234)
    <module> (work.py:6)
"""
IN_BARRIER = """Process 25506: python work.py 1
Python v3.12.1 (/usr/bin/python3.12)

Thread 25506 (idle): "MainThread"
    barrier (torch/distributed/distributed_c10d.py:6614)
    wrapper (torch/distributed/c10d_logger.py:83)
    train_step (megatron/training/training.py:1231)
    <module> (work.py:6)
"""
IN_DATA_LOADING = """Process 25507: python work.py 2
Python v3.12.1 (/usr/bin/python3.12)

Thread 25507 (idle): "MainThread"
    select (selectors.py:415)
    wait (multiprocessing/connection.py:1135)
    _poll (multiprocessing/connection.py:440)
    poll (multiprocessing/connection.py:257)
    get (multiprocessing/queues.py:113)
    _try_get_data (torch/utils/data/dataloader.py:1293)
    _get_data (torch/utils/data/dataloader.py:1466)
    _next_data (torch/utils/data/dataloader.py:1507)
    __next__ (torch/utils/data/dataloader.py:725)
    get_batch (megatron/training/utils.py:8)
    train_step (megatron/training/training.py:1229)
    <module> (work.py:6)
Thread 26545 (idle): "QueueFeederThread"
    wait (threading.py:355)
    _feed (multiprocessing/queues.py:251)
    run (threading.py:1010)
    _bootstrap_inner (threading.py:1073)
    _bootstrap (threading.py:1030)
"""
OF_0_3_14 = """Process 27466: python3.11 run311.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 27466 (idle): "MainThread"
    get_batch (megatron/training/utils.py:3)
    <module> (run311.py:4)
Thread 27525 (idle): "pin_memory"
    run (threading.py:982)
    _bootstrap_inner (threading.py:1045)
    _bootstrap (threading.py:1002)
"""


def test_the_rank_that_loads_data_is_named_by_the_default_output_of_py_spy(tmp_path: Path) -> None:
    for rank, text in enumerate((IN_ALL_REDUCE, IN_BARRIER, IN_DATA_LOADING)):
        (tmp_path / f"rank{rank}.txt").write_text(text)
    verdict = judge_hang(gather_evidence([tmp_path]))
    assert (verdict.culprits, verdict.waiting, verdict.module) == ((2,), (0, 1), "data loading")


def test_paths_without_their_folder_are_torchs_and_megatrons() -> None:
    assert is_in_collective(read_stacks(IN_ALL_REDUCE).main)
    assert is_in_collective(read_stacks(IN_BARRIER).main)
    assert not is_in_collective(read_stacks(IN_DATA_LOADING).main)
    assert read_stacks(IN_ALL_REDUCE).main[2:] == (
        Frame("train_step", "/megatron/training/training.py", 1234),
        Frame("<module>", "/work.py", 6),
    )


def test_the_main_thread_is_read_in_the_output_of_an_earlier_py_spy() -> None:
    assert is_stacks(OF_0_3_14)
    assert read_stacks(OF_0_3_14).main[0] == Frame("get_batch", "/megatron/training/utils.py", 3)


def test_a_file_that_has_no_path_keeps_its_name() -> None:
    text = IN_BARRIER.replace(
        "torch/distributed/distributed_c10d.py", "<frozen importlib._bootstrap>"
    )
    assert read_stacks(text).main[0].file == "<frozen importlib._bootstrap>"


def test_a_rank_that_writes_a_checkpoint_waits_in_no_collective() -> None:
    logger = Frame("wrapper", "/torch/distributed/c10d_logger.py", 83)
    writing = Frame("_write_item", "/torch/distributed/checkpoint/filesystem.py", 300)
    serializing = Frame("_save", "/torch/serialization.py", 1200)
    planning = Frame("all_reduce", "/torch/distributed/checkpoint/utils.py", 250)
    gathering = Frame("gather_object", "/torch/distributed/distributed_c10d.py", 3100)
    assert not is_in_collective((writing, planning, logger))
    assert not is_in_collective((serializing, writing, logger))
    assert is_in_collective((gathering, planning, logger))


def test_thread_of_autograd_is_where_rank_is(tmp_path: Path) -> None:
    in_backward = """Thread 1 (idle): "MainThread"
    _engine_run_backward (torch/autograd/graph.py:824)
    backward (torch/autograd/__init__.py:353)
    backward_step (megatron/core/pipeline_parallel/schedules.py:400)
Thread 2 (active): "Dummy-3"
    all_reduce (torch/distributed/distributed_c10d.py:2800)
    _reduce (megatron/core/tensor_parallel/mappings.py:35)
"""
    for rank, text in enumerate((in_backward, in_backward, IN_DATA_LOADING)):
        (tmp_path / f"rank{rank}.txt").write_text(text)
    verdict = judge_hang(gather_evidence([tmp_path]))
    assert (verdict.culprits, verdict.waiting) == ((2,), (0, 1))
    assert "the workers of its data loader" in verdict.next_step


def test_hook_of_user_is_shown_before_megatrons_line_that_called_it() -> None:
    frames = (
        Frame("sleep", "/usr/lib/python3.12/threading.py", 1),
        Frame("stall", "/home/me/hook.py", 3),
        Frame("_call_impl", "/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", 9),
        Frame("forward", "/venv/lib/python3.12/site-packages/megatron/core/mlp.py", 300),
    )
    assert locate_frames(frames).line == "hook.py:3 in stall, called by mlp.py:300 in forward"


def test_code_of_training_loop_is_no_startup() -> None:
    frames = (
        Frame("check", "/home/me/hook.py", 3),
        Frame("train", "/m/megatron/training/training.py", 3400),
        Frame("pretrain", "/m/megatron/training/training.py", 1100),
    )
    assert locate_frames(frames).part == "the training loop"
    assert locate_frames(frames[2:]).part == "start-up"


def test_start_up_holds_data_sets_and_checkpoint_that_it_loads() -> None:
    training = "/m/megatron/training/training.py"
    pretrain = Frame("pretrain", training, 1100)
    for function in ("build_train_valid_test_data_iterators", "load_checkpoint", "pretrain"):
        assert is_outside_training((Frame(function, training, 9), pretrain))
    train = Frame("train", training, 3400)
    assert is_outside_training((train, pretrain))
    for function in ("train_step", "evaluate", "save_checkpoint"):
        assert not is_outside_training((Frame(function, training, 9), train, pretrain))
