"""SuperNode, Flower's process at a site: takes the ticket and starts the ClientApp for it."""

from __future__ import annotations

import shutil

from fedwan.errors import ConfigError
from fedwan.flower.environment import flower_environment
from fedwan.flower.ports import free_port
from fedwan.flower.processes import Service, find_tool
from fedwan.site.settings import SiteSettings

__all__ = ["node_config", "start_supernode"]

_HOST = "127.0.0.1"


def start_supernode(settings: SiteSettings, superlink: str) -> Service:
    """Start a SuperNode for a site.

    Args:
        settings: passed on to the ClientApp, with absolute paths.
        superlink: `host:port` of the forwarder.

    Raises:
        ConfigError: a path cannot be passed on.
    """
    home = settings.dir / "flower"
    # A ClientApp that was killed while it unpacked the app leaves half of it, which Flower would
    # take for the whole.
    shutil.rmtree(home / "apps", ignore_errors=True)
    home.mkdir(parents=True, exist_ok=True)
    argv = [
        find_tool("flower-supernode"),
        "--insecure",
        "--superlink",
        superlink,
        "--host",
        _HOST,
        "--port",
        str(free_port(_HOST)),
        "--node-config",
        node_config(settings),
    ]
    log = settings.dir / "logs" / "supernode.log"
    return Service(f"SuperNode of {settings.name}", argv, log, flower_environment(home))


def node_config(settings: SiteSettings) -> str:
    """A site's settings in the form of `flower-supernode --node-config`.

    Raises:
        ConfigError: a value holds both kinds of quotes.
    """
    values = {
        "site": settings.name,
        "identity": str(settings.identity.absolute()),
        "dir": str(settings.dir.absolute()),
    }
    if settings.data_path:
        values["data_path"] = settings.data_path
    if settings.show_samples:
        values["show_samples"] = "true"
    return " ".join(f"{key}={_quoted(key, value)}" for key, value in values.items())


def _quoted(key: str, value: str) -> str:
    # Flower splits at blanks outside quotes and reads each part as TOML, where ' takes all as is.
    if "'" not in value:
        return f"'{value}'"
    if '"' not in value and "\\" not in value:
        return f'"{value}"'
    raise ConfigError(
        f"{key} is {value!r}, which Flower cannot be told; choose a path without quotes"
    )
