"""A SuperNode passes the site's settings on to its ClientApp, in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.common.config import parse_config_args

from fedwan.errors import ConfigError, WireError
from fedwan.flower import supernode
from fedwan.flower.site_file import SiteData, SiteFile


@pytest.mark.parametrize("folder", ["plain", "with blank", "dollar$=x", "it's"])
def test_a_clientapp_finds_the_settings_that_its_supernode_was_given(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def start(name: str, argv: list[str], *_: Any) -> None:
        started.append(argv)

    monkeypatch.setattr(supernode, "Service", start)
    site = SiteFile(
        site="s1",
        identity="/pki/s1",
        dir=str(tmp_path / folder),
        data=SiteData("/data of ours", True),
        command="python train.py",
        recipes=["gan"],
    )
    supernode.start_supernode(site, "127.0.0.1:1")
    ((*_, word),) = started
    settings = parse_config_args([word])["settings"]
    assert SiteFile.read(Path(str(settings))) == site


def test_a_path_that_flower_cannot_be_told_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose a path without quotes"):
        supernode.start_supernode(SiteFile(dir=str(tmp_path / "a'b\"c")), "127.0.0.1:1")


@pytest.mark.parametrize("text", ["", "[]", '{"site": 1, "color": 2}'])
def test_a_file_of_something_else_is_one_clear_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "site.json").write_text(text)
    with pytest.raises(WireError, match="is no site's settings") as raised:
        SiteFile.read(tmp_path / "site.json")
    assert "\n" not in str(raised.value)
