"""From and to what others train and load: weights (`hf`) and recipes (`recipe`).

Takes and gives files; starts no run. Only `parakit.launch` imports it.
"""
