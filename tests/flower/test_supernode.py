from __future__ import annotations

from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from flwr.common.config import parse_config_args

from fedwan.errors import ConfigError
from fedwan.flower.apps import _site_settings
from fedwan.flower.supernode import node_config
from fedwan.site.settings import SiteSettings


@pytest.mark.parametrize("folder", ["plain", "with blank", "back\\slash", "dollar$=x", "it's"])
def test_flower_reads_the_settings_as_they_were(folder: str) -> None:
    settings = SiteSettings("s1", Path("/pki") / folder, Path("/state") / folder)
    assert parse_config_args([node_config(settings)]) == {
        "site": "s1",
        "identity": str(settings.identity),
        "dir": str(settings.dir),
    }


def test_a_folder_of_data_is_passed_on_where_there_is_one() -> None:
    settings = SiteSettings("s1", Path("/pki"), Path("/state"), "/data of ours")
    assert parse_config_args([node_config(settings)])["data_path"] == "/data of ours"


def test_a_path_that_flower_cannot_be_told_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose a path without quotes"):
        node_config(SiteSettings("s1", Path("/a'b\"c"), Path("/state")))


@pytest.mark.parametrize("show_samples", [False, True])
@pytest.mark.parametrize("data_path", ["", "/data of ours"])
def test_a_clientapp_finds_the_settings_that_its_supernode_was_given(
    data_path: str, show_samples: bool
) -> None:
    settings = SiteSettings("s1", Path("/pki"), Path("/state"), data_path, show_samples)
    config = parse_config_args([node_config(settings)])
    context = Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={})
    assert _site_settings(context) == settings
