"""Filling in what the user left open, the same way in every recipe."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from fedwan.config import Config, InnerConfig, nearest
from fedwan.data import check_data
from fedwan.errors import ConfigError

__all__ = ["fill_defaults", "require"]

_OPTIMIZERS = ("adam", "adamw", "sgd")


def require(is_valid: bool, key: str, value: object, mend: str) -> None:
    """Refuse a value.

    Raises:
        ConfigError: `is_valid` is false; one line of key, value and mend.
    """
    if not is_valid:
        raise ConfigError(f"{key} is {value!r}; {mend}")
