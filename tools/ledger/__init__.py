"""What every rank sends, holds and waits for, counted inside the training processes, for any backend.

A backend talks to one object, `recorder.Recorder`, which writes a file a rank; a router reports with
`routing.record_routing`; the launcher calls `collect.collect`, which makes the run folder's `comm.json`,
`memory.json`, `time.json`, `trace.json` and `routing.json` (`tools.records`) of these files.

Imports `tools.spec` and `tools.records` alone. Imported by `megatron_patches` and `tools.native` in the
training processes and by the plan's dry run; by `tools.launch` only `collect`, which loads no torch.
"""
