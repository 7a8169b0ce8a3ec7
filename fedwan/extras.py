"""Libraries that only some of fedwan needs, by the extra of `pip install` that brings them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedwan.errors import ConfigError


def require(module: str, extra: str) -> Any:
    """Import a module that comes with an extra; a ConfigError says how to install it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise  # something that it needs in turn
        raise _missing(package, extra) from None


def folder_of(package: str, extra: str) -> Path:
    """Where a package of an extra lies, without importing it; a ConfigError as `require`'s."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise _missing(package, extra)
    return Path(spec.submodule_search_locations[0])


def _missing(package: str, extra: str) -> ConfigError:
    text = f"this needs {package}, which is not installed here"
    return ConfigError(f"{text}; pip install 'fedwan[{extra}]'")
