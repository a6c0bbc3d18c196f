"""Weights from and to Hugging Face, and runs from and to recipes of Megatron-Bridge and nemo-run.

This package decides which tensor of one format is which of the other, and which flag is which field. It reads and
writes files and starts no run.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.convert.hf.from_megatron import export_model
    from parakit.convert.hf.into_megatron import import_model, read_source
    from parakit.convert.hf.progress import ConversionError, Work, check_room
    from parakit.convert.hf.random_model import CONFIGS, write_model
    from parakit.convert.hf.tensor_files import TensorFolder, differing
    from parakit.convert.recipe.bridge import (
        build_recipe,
        check_recipe_entry,
        is_bridge_installed,
        read_recipe,
        recipe_differences,
    )
    from parakit.convert.recipe.fields import Recipe, recipe_of_flags
    from parakit.convert.recipe.flags import reading_of_fields
    from parakit.convert.recipe.imported import imported, model_name
    from parakit.convert.recipe.table import BRIDGE_VERSION, RecipeError
    from parakit.convert.recipe.written import (
        ENTRY_FILE,
        GPUS_OF_A_MACHINE,
        RECIPE_FILE,
        written_entry,
        written_recipe,
    )
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "BRIDGE_VERSION",
    "CONFIGS",
    "ENTRY_FILE",
    "GPUS_OF_A_MACHINE",
    "RECIPE_FILE",
    "ConversionError",
    "Recipe",
    "RecipeError",
    "TensorFolder",
    "Work",
    "build_recipe",
    "check_recipe_entry",
    "check_room",
    "differing",
    "export_model",
    "import_model",
    "imported",
    "is_bridge_installed",
    "model_name",
    "read_recipe",
    "read_source",
    "reading_of_fields",
    "recipe_differences",
    "recipe_of_flags",
    "write_model",
    "written_entry",
    "written_recipe",
]
