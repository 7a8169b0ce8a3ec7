from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from flwr.common.config import parse_config_args

from fedwan.errors import ConfigError, IdentityError, WireError
from fedwan.flower import site as site_module
from fedwan.flower.service import only_one
from fedwan.flower.site import main, serve_site, start_supernode
from fedwan.flower.site_file import SiteData, SiteFile
from tests.planes import eventually, in_thread


def config(tmp_path: Path, identity: Path, **changes: str) -> SiteFile:
    values = {"site": "s1", "door": "127.0.0.1:9", "dir": str(tmp_path / "state")} | changes
    return SiteFile(identity=str(identity), **values)  # type: ignore[arg-type]


def test_a_name_that_is_not_the_certificates_is_refused(tmp_path: Path, authority: Path) -> None:
    with pytest.raises(IdentityError, match=r"site is 's2' but .* is the identity of 's1'"):
        serve_site(config(tmp_path, authority / "s1", site="s2"))


def test_a_second_service_in_the_same_folder_is_refused(tmp_path: Path, authority: Path) -> None:
    with only_one(tmp_path / "state", "dir"), pytest.raises(ConfigError, match="in use"):
        serve_site(config(tmp_path, authority / "s1"))


def test_no_identity_is_one_line_and_exit_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "site.json"
    config(tmp_path, Path("none")).write(settings)
    monkeypatch.setattr("sys.argv", ["site", str(settings)])
    assert main() == 2
    errors = capsys.readouterr().err
    assert errors.startswith("fedwan: identity file none/ca.crt is missing")
    assert errors.count("\n") == 1


@pytest.mark.slow
def test_a_service_whose_coordinator_never_comes_stops_when_told(
    tmp_path: Path, authority: Path
) -> None:
    stop = threading.Event()
    log = tmp_path / "state" / "logs" / "site.log"
    words = "front door 127.0.0.1:9 is away"

    def tell() -> None:
        try:
            eventually(lambda: log.exists() and words in log.read_text(), within_s=60.0)
            time.sleep(2.0)  # in which it is tried again, but not said again
        finally:
            stop.set()

    told = in_thread(tell)
    serve_site(config(tmp_path, authority / "s1"), stop=stop)
    told()
    assert log.read_text().count(words) == 1


@pytest.mark.parametrize("folder", ["plain", "with blank", "dollar$=x", "it's"])
def test_a_clientapp_finds_the_settings_that_its_supernode_was_given(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def start(name: str, argv: list[str], *_: Any) -> None:
        started.append(argv)

    monkeypatch.setattr(site_module, "Service", start)
    site = SiteFile(
        site="s1",
        identity="/pki/s1",
        dir=str(tmp_path / folder),
        data=SiteData("/data of ours", True),
        command="python train.py",
        recipes=["gan"],
    )
    start_supernode(site, "127.0.0.1:1")
    ((*_, word),) = started
    settings = parse_config_args([word])["settings"]
    assert SiteFile.read(Path(str(settings))) == site


def test_a_path_that_flower_cannot_be_told_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose a path without quotes"):
        start_supernode(SiteFile(dir=str(tmp_path / "a'b\"c")), "127.0.0.1:1")


@pytest.mark.parametrize("text", ["", "[]", '{"site": 1, "color": 2}'])
def test_a_file_of_something_else_is_one_clear_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "site.json").write_text(text)
    with pytest.raises(WireError, match="is no site's settings") as raised:
        SiteFile.read(tmp_path / "site.json")
    assert "\n" not in str(raised.value)
