"""Recipes of Megatron-Bridge: a run of the kit as one, and one as the kit's flags."""
