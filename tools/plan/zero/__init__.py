"""Data parallelism, a pipeline and ZeRO over slow and fast links and many nodes, predicted.

What `make compare-zero GPU=` prints; takes a model and a device, gives rows by link and nodes.
"""
