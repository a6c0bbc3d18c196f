"""Pipeline schedules, event by event: what they idle, hold and let go stale. No torch, no Megatron."""
