"""SITE.yaml is checked like every other configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedwan.cli.site import SiteFile, load_site
from fedwan.errors import ConfigError

GOOD = "site: paris\nidentity: identity\ndoor: coordinator.example.com:7444\ndir: state\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    return path


def test_relative_paths_begin_at_the_files_folder(tmp_path: Path) -> None:
    assert load_site(write(tmp_path, GOOD), []) == SiteFile(
        site="paris",
        identity=str(tmp_path / "identity"),
        door="coordinator.example.com:7444",
        dir=str(tmp_path / "state"),
        folder=str(tmp_path),
    )


def test_absolute_paths_stay_and_words_beat_the_file(tmp_path: Path) -> None:
    settings = load_site(write(tmp_path, GOOD), ["dir=/var/lib/fedwan", "site=rome"])
    assert (settings.dir, settings.site) == ("/var/lib/fedwan", "rome")


def test_a_folder_of_data_may_be_named_and_begins_at_the_files_folder(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "data: {path: images}\n")
    assert load_site(path, []).data.path == str(tmp_path / "images")
    assert load_site(path, ["data.path=/srv/images"]).data.path == "/srv/images"
    assert load_site(write(tmp_path, GOOD), []).data.path == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD + "gate: x\n", "unknown key 'gate'"),
        (
            GOOD + "data: images\n",
            "data = 'images' is a section, not a setting; it holds data.path",
        ),
        (GOOD + "doors: x\n", "did you mean 'door'?"),
        (GOOD.replace("door: coordinator.example.com:7444\n", ""), "has no 'door'; add a line"),
        (GOOD.replace(":7444", ""), "door = 'coordinator.example.com' is no host:port"),
        ("", "has no 'site'"),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_site(write(tmp_path, text), [])
    assert says in str(caught.value) and "\n" not in str(caught.value)
