"""Import the public names of a package from their modules on first use.

A package's `__init__.py` lists its public names twice: in `__all__`, and as imports below `if TYPE_CHECKING:`,
where type checkers find them. `lazy_names` reads the imports, so that importing a package, or one of its
modules, does not load its other modules. Python 3.6 can import this file, because `make doctor` does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def lazy_names(package: str, file: str) -> "Callable[[str], Any]":
    """Return a package's `__getattr__`, which imports a public name from the module that defines it.

    Args:
        package: `__name__` of the package.
        file: `__file__` of its `__init__.py`. The imports inside of its `if` are the public names.

    Returns:
        The function. It raises AttributeError for a name that the package does not import there.
    """
    modules: dict[str, str] = {}

    def get_attribute(name: str) -> Any:
        if not modules:
            modules.update(_read_imports(file))
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return get_attribute


def _read_imports(file: str) -> "dict[str, str]":
    """Return the module of each name that the file imports inside of an `if`, by name."""
    # These imports would take half of the time of `import parakit` at the top.
    import ast
    from pathlib import Path

    modules = {}
    for statement in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.If):
            for node in statement.body:
                if isinstance(node, ast.ImportFrom):
                    modules.update({alias.name: node.module or "" for alias in node.names})
    return modules
