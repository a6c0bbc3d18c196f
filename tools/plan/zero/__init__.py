"""Data parallelism, a pipeline and ZeRO over slow and fast links and many nodes, predicted."""
