import pytest

from parakit.artifacts.run import Status
from parakit.logs.diagnosis import diagnose_log
from tests.reporting.factory import iteration_line, log_text

EPILOGUE = """Traceback (most recent call last):
  File "/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
pretrain_gpt.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2025-09-08_00:00:00
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 12345)
  error_file: <N/A>
============================================================
"""


def traceback(error: str, prefix: str = "", where: str = "arguments.py") -> str:
    lines = (
        "Traceback (most recent call last):",
        f'  File "/megatron/training/{where}", line 431, in validate_args',
        "    assert args.hidden_size",
        error,
    )
    return "".join(f"{prefix}{line}\n" for line in lines)


def judged(tmp_path, text, exit_code=None, interrupted=False):
    path = tmp_path / "log.txt"
    path.write_text(text)
    return diagnose_log(path, exit_code, interrupted)


def test_finished_run_is_ok(tmp_path):
    diagnosis = judged(tmp_path, log_text([9, 9, 9]), 0)
    assert (diagnosis.status, diagnosis.exit_code, diagnosis.reason) == (Status.OK, 0, "")


def test_run_that_skipped_every_step_is_nan_with_advice_on_the_loss_scale(tmp_path):
    lines = [iteration_line(number, loss=None, skipped=1) for number in (1, 2, 3)]
    diagnosis = judged(tmp_path, "\n".join(lines), 0)
    assert diagnosis.status is Status.NAN
    assert "each of 3 iterations was skipped" in diagnosis.reason
    taken = judged(tmp_path, "\n".join([*lines, iteration_line(4, loss=10.0)]), 0)
    assert taken.status is Status.OK
    some = judged(tmp_path, iteration_line(5, loss=10.0, skipped=3), 0)
    assert some.status is Status.OK


@pytest.mark.parametrize(("last", "advised"), [(2**31, 65536), (65536, 16384), (2, 1)])
def test_advised_loss_scale_is_below_the_skipped_loss_scale(tmp_path, last, advised):
    line = iteration_line(1, loss=None, skipped=1).replace(
        "loss scale: 1.0", f"loss scale: {last}.0"
    )
    assert f"'--initial-loss-scale {advised}'" in judged(tmp_path, line, 0).reason


def test_foreign_log_that_reached_its_last_iteration_is_ok(tmp_path):
    assert judged(tmp_path, iteration_line(5, total=5)).status is Status.OK


def test_log_that_just_ends_is_incomplete(tmp_path):
    diagnosis = judged(tmp_path, iteration_line(5, total=9))
    assert diagnosis.status is Status.INCOMPLETE
    assert "after iteration 5" in diagnosis.reason


def test_out_of_memory_names_rank_and_allocation(tmp_path):
    error = traceback(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 1 has a"
        " total capacity of 139.81 GiB of which 10.06 MiB is free. Including non-PyTorch memory,"
        " this process has 139.79 GiB memory in use.",
        "[rank1]: ",
    )
    diagnosis = judged(tmp_path, iteration_line(1) + "\n" + error + EPILOGUE, 1)
    assert (diagnosis.status, diagnosis.rank) == (Status.OUT_OF_MEMORY, 1)
    assert diagnosis.reason == (
        "Rank 1 ran out of memory when it tried to allocate 20.00 GiB"
        " (GPU 1 of 139.81 GiB, 10.06 MiB free)."
    )


def test_out_of_host_memory_is_out_of_memory(tmp_path):
    error = traceback(
        "RuntimeError: [enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate"
        " memory: you tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
    )
    diagnosis = judged(tmp_path, error, 1)
    assert diagnosis.status is Status.OUT_OF_MEMORY
    assert "4096 bytes" in diagnosis.reason


def test_first_real_error_beats_lost_connections_and_the_epilogue(tmp_path):
    lost = traceback(
        "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1",
        "[rank0]: ",
    )
    real = traceback("ValueError: heads 20 are not divisible by 3", "[rank1]: ")
    diagnosis = judged(tmp_path, lost + real + EPILOGUE, 1)
    assert (diagnosis.status, diagnosis.rank) == (Status.CRASHED, 1)
    assert diagnosis.reason.startswith("rank 1: ValueError: heads 20 are not divisible by 3")


FAILED_LOAD = """[rank{0}]: Traceback (most recent call last):
[rank{0}]:   File "/torch/distributed/checkpoint/utils.py", line 200, in reduce_scatter
[rank{0}]:     raise result
[rank{0}]: torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([0])
[rank{0}]: Traceback (most recent call last): (RANK 0)
[rank{0}]:   File "/torch/distributed/checkpoint/utils.py", line 163, in reduce_scatter
[rank{0}]:     local_data = map_fun()
[rank{0}]:   File "/megatron/core/dist_checkpointing/strategies/torch.py", line 541, in create_local_plan
[rank{0}]:     self._validate_global_shapes(self.metadata, self.shapes_validation_sharded_tensors)
[rank{0}]: KeyError: 'output_layer.weight'

"""


def test_a_failed_load_says_its_cause_and_not_torchs_wrapper(tmp_path):
    """torch raises an exception that lists ranks, and prints the traceback of each below it."""
    judgement = judged(tmp_path, FAILED_LOAD.format(0) + FAILED_LOAD.format(1) + EPILOGUE, 1)
    assert judgement.status is Status.CRASHED
    assert "KeyError: 'output_layer.weight'" in judgement.reason
    assert "CheckpointException" not in judgement.reason
    wrapper_alone = FAILED_LOAD.format(0).partition(
        "[rank0]: Traceback (most recent call last): ("
    )[0]
    assert "CheckpointException ranks" in judged(tmp_path, wrapper_alone + EPILOGUE, 1).reason


def test_assertion_without_message_is_reported_with_its_condition_and_line(tmp_path):
    diagnosis = judged(tmp_path, traceback("AssertionError"), 1)
    assert "AssertionError: args.hidden_size does not hold, in arguments.py:431" in diagnosis.reason


def test_usage_error_is_quoted(tmp_path):
    text = "usage: pretrain_gpt.py [-h]\npretrain_gpt.py: error: unrecognized arguments: --foo\n"
    diagnosis = judged(tmp_path, text, 2)
    assert diagnosis.status is Status.CRASHED
    assert "unrecognized arguments: --foo" in diagnosis.reason


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "docker: Error response from daemon: invalid mount config for type "
            '"bind": bind source path does not exist: /data',
            "bind source path does not exist: /data",
        ),
        (
            "Patch 'amp_c' (Apex is absent) expects megatron.core.Gone, which Megatron 0.19.0 does "
            "not have.",
            "Patch 'amp_c' (Apex is absent) expects megatron.core.Gone",
        ),
    ],
)
def test_error_before_megatron_starts_is_a_crash_with_its_message(tmp_path, line, message):
    diagnosis = judged(tmp_path, f"Unable to find image 'kit' locally\n{line}\n", 125)
    assert diagnosis.status is Status.CRASHED
    assert message in diagnosis.reason
    assert "names no error" not in diagnosis.reason


def test_log_with_only_lost_connections_reports_a_lost_connection(tmp_path):
    diagnosis = judged(tmp_path, traceback("RuntimeError: Connection reset by peer"), 1)
    assert diagnosis.status is Status.CRASHED
    assert "Connection reset by peer" in diagnosis.reason


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: Rank 0, node n, device 0, iteration 5: Unexpected result nan"
        " (message='found NaN in local forward loss calculation')",
        "AssertionError: Rank 0: found NaN in local forward loss calculation. Device: 0",
    ],
)
def test_nan_that_stops_megatron_is_nan(tmp_path, error):
    assert judged(tmp_path, traceback(error), 1).status is Status.NAN


def test_nan_check_of_megatron_on_a_rank_is_nan(tmp_path):
    start = (
        "ERROR:megatron.core.rerun_state_machine:Unexpected result nan on rank 1 at iteration #7"
    )
    message = f"{start} invocation #1 (message='found NaN in local forward loss calculation')"
    text = f"{iteration_line(6)}\n{message}\n{EPILOGUE.replace('exitcode  : 1', 'exitcode  : 16')}"
    diagnosis = judged(tmp_path, text, 1)
    assert (diagnosis.status, diagnosis.rank) == (Status.NAN, 1)
    assert "Unexpected result nan: found NaN in local forward loss calculation, at iteration 7" in (
        diagnosis.reason
    )


def test_nan_from_iteration_0_in_a_nemo_log_is_nan(tmp_path):
    lines = [iteration_line(number, loss=float("nan"), total=2) for number in (0, 1, 2)]
    diagnosis = judged(tmp_path, "\n".join(lines))
    assert (diagnosis.status, diagnosis.reason) == (Status.NAN, "NaN from iteration 0 to the end.")


def test_a_damaged_count_of_nan_iterations_in_the_last_line_is_no_nan(tmp_path):
    lines = [iteration_line(1), iteration_line(2, nan=-1)]
    assert judged(tmp_path, "\n".join(lines)).status is Status.INCOMPLETE


def test_nan_to_the_end_is_nan_from_its_first_iteration(tmp_path):
    lines = [iteration_line(n, loss=None if n > 3 else 9.0, nan=int(n > 3)) for n in range(1, 7)]
    diagnosis = judged(tmp_path, "\n".join([*lines, "[after training is done] datetime: x"]), 0)
    assert diagnosis.status is Status.NAN
    assert "from iteration 4" in diagnosis.reason


def test_nan_that_later_iterations_recover_from_is_ok(tmp_path):
    lines = [iteration_line(n, nan=int(n == 2)) for n in range(1, 5)]
    assert judged(tmp_path, "\n".join(lines), 0).status is Status.OK


def test_run_stopped_by_the_user_is_interrupted(tmp_path):
    diagnosis = judged(
        tmp_path, iteration_line(7) + "\n" + traceback("KeyboardInterrupt"), 130, True
    )
    assert diagnosis.status is Status.INTERRUPTED
    assert "after iteration 7" in diagnosis.reason


@pytest.mark.parametrize(
    "text",
    [
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\nKeyboardInterrupt\n',
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 1 got signal: 15\n",
        "[exiting program after receiving SIGTERM.] datetime: 2025-09-08 00:00:00 \n",
    ],
)
def test_interruptions_in_foreign_logs_are_recognised(tmp_path, text):
    assert judged(tmp_path, iteration_line(3) + "\n" + text).status is Status.INTERRUPTED


def test_stopping_a_run_that_already_failed_is_a_crash(tmp_path):
    text = traceback("ValueError: bad", "[rank0]: ") + traceback("KeyboardInterrupt", "[rank1]: ")
    assert judged(tmp_path, text, 1).status is Status.CRASHED


def test_kill_without_a_message_names_the_signal(tmp_path):
    text = iteration_line(3) + "\n" + EPILOGUE.replace("exitcode  : 1", "exitcode  : -9")
    diagnosis = judged(tmp_path, text, 1)
    assert (diagnosis.status, diagnosis.rank) == (Status.CRASHED, 1)
    assert "SIGKILL" in diagnosis.reason


FAILURES = """Failures:
[1]:
  time      : 2025-09-08_00:00:00
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 12346)
  traceback : Signal 9 (SIGKILL) received by PID 12346
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 12345)
============================================================
"""


def test_killed_rank_is_the_cause_despite_errors_of_other_ranks(tmp_path):
    lost = traceback("RuntimeError: Connection closed by peer", "[rank0]: ")
    diagnosis = judged(tmp_path, iteration_line(3) + "\n" + lost + FAILURES, 1)
    assert (diagnosis.status, diagnosis.rank) == (Status.CRASHED, 1)
    assert diagnosis.reason.startswith("Rank 1 was killed by SIGKILL")
    assert diagnosis.reason.endswith("after iteration 3")


@pytest.mark.parametrize(
    "prefix",
    [
        "[2024-03-01 10:00:01,123] torch.distributed.elastic.multiprocessing.api: [ERROR] ",
        "ERROR:torch.distributed.elastic.multiprocessing.api:",
        "E0419 10:10:00.858000 1200 torch/distributed/elastic/multiprocessing/api.py:882] ",
    ],
)
def test_killed_process_is_named_by_its_local_rank_if_list_of_torchrun_is_missing(tmp_path, prefix):
    line = f"{prefix}failed (exitcode: -9) local_rank: 2 (pid: 1236) of binary: /usr/bin/python\n"
    status = judged(tmp_path, iteration_line(1) + "\n" + line)
    assert (status.status, status.rank) == (Status.CRASHED, None)
    assert status.reason.startswith("The process with local rank 2 was killed by SIGKILL")


def test_list_of_torchrun_has_priority_over_local_rank(tmp_path):
    line = "E0419 10:10:00 1 api.py:882] failed (exitcode: -9) local_rank: 1 (pid: 12345) of binary: python\n"
    listed = EPILOGUE.replace("rank      : 1", "rank      : 9").replace(": 1 (pid", ": -9 (pid")
    status = judged(tmp_path, iteration_line(1) + "\n" + line + listed)
    assert status.rank == 9
    assert status.reason.startswith("Rank 9 was killed by SIGKILL")


def test_a_rank_that_torchrun_ended_is_not_the_cause(tmp_path):
    ended = FAILURES.replace("-9", "-15")
    error = traceback("ValueError: bad", "[rank0]: ")
    assert judged(tmp_path, error + ended, 1).rank == 0


def test_exit_code_alone_is_reported(tmp_path):
    assert "Exit code 3" in judged(tmp_path, iteration_line(1), 3).reason


@pytest.mark.parametrize("text", ["", "hello\n"])
def test_text_of_another_program_is_no_log(tmp_path, text):
    diagnosis = judged(tmp_path, text)
    assert diagnosis.status is Status.NO_LOG
    assert "log.txt" in diagnosis.reason


def test_missing_log_is_no_log(tmp_path):
    diagnosis = diagnose_log(tmp_path / "log.txt", None, False)
    assert diagnosis.status is Status.NO_LOG
    assert "cannot be read" in diagnosis.reason


def test_handled_exception_does_not_spoil_a_finished_run(tmp_path):
    assert judged(tmp_path, traceback("ImportError: apex") + log_text([1, 1])).status is Status.OK


def test_exceptions_during_a_requested_stop_are_no_crash(tmp_path):
    text = traceback("KeyboardInterrupt", "[rank1]: ") + traceback("ValueError: bad", "[rank0]: ")
    assert judged(tmp_path, text, 1).status is Status.INTERRUPTED


def test_ranks_that_torchrun_stops_after_a_kill_were_not_interrupted(tmp_path):
    stopped = "[exiting program after receiving SIGTERM.] datetime: 2025-09-08 00:00:00 \n"
    diagnosis = judged(tmp_path, stopped + EPILOGUE.replace("exitcode  : 1", "exitcode  : -11"), 1)
    assert (diagnosis.status, diagnosis.rank) == (Status.CRASHED, 1)
    assert "SIGSEGV" in diagnosis.reason


SLURM = "slurmstepd: error: *** JOB 4711 ON node01 CANCELLED AT 2025-09-08T00:00:00{} ***"


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (SLURM.format(" DUE TO TIME LIMIT"), Status.INTERRUPTED, "at the job's time limit after"),
        (SLURM.format(" DUE TO PREEMPTION"), Status.INTERRUPTED, "which preempted the job after"),
        (SLURM.format(""), Status.INTERRUPTED, "the job or its step was cancelled after"),
        (
            SLURM.format(" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"),
            Status.CRASHED,
            "Slurm: a node failed",
        ),
        ("srun: error: Node failure on node07", Status.CRASHED, "node node07 failed"),
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0. Some of the step tasks"
            " have been OOM Killed.",
            Status.OUT_OF_MEMORY,
            "host memory",
        ),
        ("srun: error: node01: task 3: Out Of Memory", Status.OUT_OF_MEMORY, "host memory"),
        (
            "W0908 00:00:00 torch/distributed/elastic/agent/server/api.py:719] Received"
            " Signals.SIGTERM death signal, shutting down workers",
            Status.INTERRUPTED,
            "SIGTERM",
        ),
        ("Received 15 death signal, shutting down workers", Status.INTERRUPTED, "SIGTERM"),
        ("Terminated", Status.INTERRUPTED, "SIGTERM"),
        (
            "run.sh: line 12: 4711 Killed                  python train.py",
            Status.CRASHED,
            "SIGKILL",
        ),
    ],
)
def test_run_ended_by_cluster_or_signal_names_the_cause(tmp_path, text, status, reason):
    diagnosis = judged(tmp_path, f"{iteration_line(7)}\n{text}\n")
    assert diagnosis.status is status
    assert reason in diagnosis.reason


def test_a_step_that_slurm_cancels_because_a_task_failed_is_a_crash(tmp_path):
    failed = "srun: error: node01: task 0: Exited with exit code 1\n"
    text = iteration_line(7) + "\n" + traceback("ValueError: bad") + failed + SLURM.format("")
    assert judged(tmp_path, text).status is Status.CRASHED


def test_kill_by_slurm_for_memory_is_out_of_memory(tmp_path):
    oom = "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0.\n"
    text = iteration_line(3) + "\n" + oom + EPILOGUE.replace("exitcode  : 1", "exitcode  : -9")
    assert judged(tmp_path, text, 1).status is Status.OUT_OF_MEMORY


def test_nan_at_the_end_of_an_incomplete_log_is_nan(tmp_path):
    lines = [iteration_line(n, loss=None if n > 3 else 9.0, nan=int(n > 3)) for n in range(1, 7)]
    diagnosis = judged(tmp_path, "\n".join(lines))
    assert diagnosis.status is Status.NAN
    assert diagnosis.reason == "NaN from iteration 4, where the log stops after iteration 6."


@pytest.mark.parametrize(
    "error",
    [
        # Printed by torch and numpy when RLIMIT_AS refused them memory.
        "RuntimeError: could not create a primitive",
        "RuntimeError: could not execute a primitive",
        "RuntimeError: std::bad_alloc",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate"
        " memory: you tried to allocate 524288 bytes. Error code 12 (Cannot allocate memory)",
        "MemoryError",
        "ImportError: libtorch_cpu.so: failed to map segment from shared object",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for an array with shape"
        " (1000000000,) and data type float64",
    ],
)
def test_allocation_refused_to_a_rank_is_out_of_memory(tmp_path, error):
    status = judged(tmp_path, traceback(error, "[rank1]: ", "gpt.py") + EPILOGUE, 1)
    assert (status.status, status.rank) == (Status.OUT_OF_MEMORY, 1)
    assert status.reason.startswith("Rank 1 ran out of memory")


@pytest.mark.parametrize(
    "line",
    [
        "cannot allocate memory for thread-local data: ABORT",
        "OpenBLAS error: Memory allocation still failed after 10 retries, giving up.",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
)
def test_allocation_refused_outside_python_is_out_of_memory(tmp_path, line):
    status = judged(tmp_path, f"{iteration_line(3)}\n{line}\n{EPILOGUE}", 1)
    assert status.status is Status.OUT_OF_MEMORY


def test_a_primitive_that_onednn_does_not_support_is_not_out_of_memory(tmp_path):
    # Printed by torch for fp16 on a processor without its instructions.
    error = (
        "RuntimeError: could not create a primitive descriptor for the inner product forward propagation"
        " primitive. Run workload with environment variable ONEDNN_VERBOSE=all to get additional"
        " diagnostic information."
    )
    status = judged(tmp_path, traceback(error, "[rank1]: ", "gpt.py") + EPILOGUE, 1)
    assert status.status is Status.CRASHED
    assert "primitive descriptor" in status.reason


@pytest.mark.parametrize(
    "error",
    [
        "OSError: [Errno 24] Too many open files: '/dev/null'",
        "RuntimeError: [enforce fail at /__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/loop.cc:48]"
        " rv != -1. -1 vs -1. pipe: Too many open files",
        "torch.distributed.DistNetworkError: The server socket has failed to bind. port: 29999,"
        " useIpv6: 0, code: -24, name: EMFILE, message: too many open files",
    ],
)
def test_too_many_open_files_names_the_limit_to_raise(tmp_path, error):
    status = judged(tmp_path, traceback(error, "[rank1]: ", "gpt.py") + EPILOGUE, 1)
    assert (status.status, status.rank) == (Status.CRASHED, 1)
    assert status.reason.startswith("Rank 1 was allowed no more open files (")
    assert status.reason.endswith("; raise the limit (ulimit -n).")
