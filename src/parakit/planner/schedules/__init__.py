"""Table and picture of pipeline schedules: what they idle, hold and let go stale. `parakit.costs` simulates them."""
