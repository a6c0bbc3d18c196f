"""From and to what others train and load: weights (`hf`) and recipes (`recipe`); `torch_dist` reads
Megatron's checkpoints.

Takes and gives files; starts no run. Only `tools.launch` imports it.
"""
