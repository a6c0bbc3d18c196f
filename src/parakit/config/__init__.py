"""What a run is: models, strategies, hardware, published figures, settings. The ground of the kit.

Takes the `.args` and YAML files of `examples/` and this folder; gives frozen dataclasses and the codecs
between them, Megatron's flags and its printed arguments. Imports no torch and nothing else of the kit;
everything may import it.
"""
