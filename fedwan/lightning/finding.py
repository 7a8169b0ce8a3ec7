"""From the name of a LightningModule to an instance that has its optimisers."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from fedwan.errors import ConfigError
from fedwan.names import nearest

__all__ = ["ATTRIBUTE", "find_class", "lightning_of", "make_module"]

ATTRIBUTE = "model.module"
"""The setting that names the class, for messages."""


def find_class(path: str) -> type:
    """The LightningModule at `package.module:ClassName`.

    Raises:
        ConfigError: there is none, or it is no LightningModule.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(
            f"{ATTRIBUTE} = {path!r} names no class; write it like {ATTRIBUTE}=my_models.gan:Gan"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(_why_missing(path, module_name, error)) from None
    classes = [n for n, value in vars(module).items() if _is_lightning(value)]
    if name not in classes:
        holds = f"it holds {', '.join(classes)}" if classes else "it holds none"
        raise ConfigError(
            f"{ATTRIBUTE} = {path!r}: {module_name} has no LightningModule {name!r}; "
            f"{holds}{nearest(name, classes)}"
        )
    found: type = getattr(module, name)
    return found


def lightning_of(module_class: type) -> str:
    """The package that a LightningModule is of: `pytorch_lightning` or `lightning.pytorch`."""
    base = next(c for c in module_class.__mro__ if c.__name__ == "LightningModule")
    return base.__module__.removesuffix(".core.module")


def make_module(path: str, args: Mapping[str, Any]) -> Any:
    """An instance of the LightningModule at `path`, from its own arguments.

    Raises:
        ConfigError: see `find_class`; or its arguments do not fit, or it cannot be trained.
    """
    module_class: Any = find_class(path)
    try:
        inspect.signature(module_class).bind(**args)
    except TypeError as error:
        takes = ", ".join(inspect.signature(module_class).parameters) or "none"
        raise ConfigError(
            f"model.args = {dict(args)!r} does not fit {path}: {error}; it takes {takes}"
        ) from None
    for hook in ("training_step", "configure_optimizers"):
        if not is_overridden(module_class, hook):
            raise ConfigError(f"{ATTRIBUTE} = {path!r} defines no {hook}; add one to the class")
    module = module_class(**args)
    if hasattr(module, "setup"):
        module.setup("fit")
    module.configure_model()
    return module


def is_overridden(module_class: type, hook: str) -> bool:
    """Whether a LightningModule defines a hook of its own."""
    base = next(c for c in module_class.__mro__ if c.__name__ == "LightningModule")
    return getattr(module_class, hook, None) is not getattr(base, hook, None)


def _is_lightning(value: object) -> bool:
    return isinstance(value, type) and any(
        c.__name__ == "LightningModule" for c in value.__mro__[1:]
    )


def _why_missing(path: str, module_name: str, error: ModuleNotFoundError) -> str:
    missing = error.name or ""
    if missing.partition(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric"):
        return (
            f"{ATTRIBUTE} = {path!r} needs {missing!r}, which is not installed; "
            "pip install 'fedwan[lightning]'"
        )
    if module_name == missing or module_name.startswith(f"{missing}."):
        return (
            f"{ATTRIBUTE} = {path!r}: there is no module {missing!r}; put it into the app's sites/ "
            "as sites/_NAME.py and write sites._NAME:CLASS, or install it at every site"
        )
    return f"{ATTRIBUTE} = {path!r} imports {missing!r}, which is not installed; install it"
