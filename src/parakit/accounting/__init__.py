"""What every rank sends, holds and waits for, counted inside the training processes, for any backend.

A backend talks to one object, `recorder.Recorder`, which writes a file a rank; a router reports with
`routing.record_routing`; the launcher calls `collect.collect`, which makes the run folder's `comm.json`,
`memory.json`, `time.json`, `trace.json` and `routing.json` (`parakit.artifacts`) of these files.

Imports `parakit.config` and `parakit.artifacts` alone. Imported by `megatron_patches` and `parakit.native` in the
training processes and by the plan's dry run; by `parakit.launch` only `collect`, which loads no torch.
"""
