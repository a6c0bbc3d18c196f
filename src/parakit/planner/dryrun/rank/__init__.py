"""Inside the dry run's process: torch, Megatron, the kit's patches and its ledgers."""
