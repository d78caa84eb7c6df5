"""Packages that only training needs, imported when they are first used."""

import importlib
from types import ModuleType

from rlloss.errors import BackendUnavailableError


def require(name: str) -> ModuleType:
    """Imports an optional package.

    Args:
        name: Dotted module name, such as `transformers`.

    Raises:
        BackendUnavailableError: It is not installed; the message gives the pip command.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BackendUnavailableError(
            f"Training needs the package {name.partition('.')[0]!r}, which cannot be imported ({error}). "
            'Install it with: pip install "rlloss[train]"'
        ) from error
