"""What becomes of a training step's tensors: written, compared with those written, or replaced.

For training processes of any backend, so that `parakit.verify` can compare them: `sinks` are where tensors
and their gradients go. Which tensors of a model those are, and under which names, each backend says
itself (`megatron_patches.capture`, `parakit.native.capture`).
"""
