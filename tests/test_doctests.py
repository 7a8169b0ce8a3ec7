"""Every example in a docstring is run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import fedwan


def test_examples_do_what_they_say() -> None:
    for info in pkgutil.walk_packages(fedwan.__path__, "fedwan."):
        if not info.name.endswith("__main__"):
            assert doctest.testmod(importlib.import_module(info.name)).failed == 0, info.name
