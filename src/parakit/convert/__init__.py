"""Convert weights from and to Hugging Face, and runs from and to recipes of Megatron-Bridge and nemo-run.

This package decides which tensor of one format is which tensor of the other, and which flag is which
field. It reads and writes files and starts no run.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.convert.hf.from_megatron import export_model
    from parakit.convert.hf.into_megatron import import_model, read_source
    from parakit.convert.hf.progress import ConversionError, ConversionProgress, check_disk_space
    from parakit.convert.hf.random_model import CONFIGS, write_model
    from parakit.convert.hf.tensor_files import TensorFolder, list_differing_tensors
    from parakit.convert.recipe.bridge import (
        build_recipe,
        check_recipe_entry,
        is_bridge_installed,
        read_recipe,
        recipe_differences,
    )
    from parakit.convert.recipe.fields import Recipe, recipe_from_flags
    from parakit.convert.recipe.flags import flags_from_fields
    from parakit.convert.recipe.imported import build_imported_recipe, model_name
    from parakit.convert.recipe.table import BRIDGE_VERSION, RecipeError
    from parakit.convert.recipe.written import (
        ENTRY_FILE,
        GPUS_PER_MACHINE,
        RECIPE_FILE,
        render_entry,
        render_recipe,
    )
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "BRIDGE_VERSION",
    "CONFIGS",
    "ENTRY_FILE",
    "GPUS_PER_MACHINE",
    "RECIPE_FILE",
    "ConversionError",
    "ConversionProgress",
    "Recipe",
    "RecipeError",
    "TensorFolder",
    "build_imported_recipe",
    "build_recipe",
    "check_disk_space",
    "check_recipe_entry",
    "export_model",
    "flags_from_fields",
    "import_model",
    "is_bridge_installed",
    "list_differing_tensors",
    "model_name",
    "read_recipe",
    "read_source",
    "recipe_differences",
    "recipe_from_flags",
    "render_entry",
    "render_recipe",
    "write_model",
]
