"""Libraries that only some of fedwan needs, by the extra of `pip install` that brings them."""

from __future__ import annotations

from importlib import import_module
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
        raise ConfigError(
            f"this needs {package}, which is not installed here; pip install 'fedwan[{extra}]'"
        ) from None
