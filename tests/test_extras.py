"""Libraries that are not everybody's: what to install is said where one is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fedwan.errors import ConfigError
from fedwan.extras import folder_of, require
from fedwan.output.samples import draw_samples


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Without("matplotlib"), *sys.meta_path])
    with pytest.raises(ConfigError, match=r"needs matplotlib.*pip install 'fedwan\[report\]'"):
        draw_samples(tmp_path / "a.png", torch.zeros(1, 1, 2, 2), None, "")
    with pytest.raises(ConfigError, match=r"needs not_there.*pip install 'fedwan\[demo\]'"):
        folder_of("not_there", "demo")  # which is only read


def test_what_a_package_itself_lacks_is_not_mistaken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needy.py").write_text("import does_not_exist")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="does_not_exist"):
        require("needy", "demo")


class Without:
    """Finds nothing, and says that one package is missing."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=self.package)
