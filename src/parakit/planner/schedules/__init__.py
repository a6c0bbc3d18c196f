"""Pipeline schedules, event by event: what they idle, hold and let go stale. No torch, no Megatron.

Takes stages, micro batches and a schedule, gives its `SimulatedSchedule`. The report's timelines import
`simulate`.
"""
