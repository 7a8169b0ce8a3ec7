"""SuperNode, Flower's process at a site: takes the ticket and starts the ClientApp for it."""

from __future__ import annotations

import shutil
from pathlib import Path

from fedwan.errors import ConfigError
from fedwan.flower.environment import flower_environment
from fedwan.flower.ports import free_port
from fedwan.flower.processes import Service, find_tool
from fedwan.flower.site_file import SiteFile

__all__ = ["start_supernode"]

_HOST = "127.0.0.1"


def start_supernode(site: SiteFile, superlink: str) -> Service:
    """Start a SuperNode for a site.

    Args:
        site: passed on to the ClientApp, in a file.
        superlink: `host:port` of the forwarder.

    Raises:
        ConfigError: the path of that file cannot be passed on.
    """
    home = Path(site.dir) / "flower"
    # A ClientApp that was killed while it unpacked the app leaves half of it, which Flower would
    # take for the whole.
    shutil.rmtree(home / "apps", ignore_errors=True)
    settings = home / "site.json"
    site.write(settings)
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
        f"settings={_quoted('dir', str(settings.absolute()))}",
    ]
    log = Path(site.dir) / "logs" / "supernode.log"
    return Service(f"SuperNode of {site.site}", argv, log, flower_environment(home))


def _quoted(key: str, value: str) -> str:
    # Flower splits at blanks outside quotes and reads each part as TOML, where ' takes all as is.
    if "'" not in value:
        return f"'{value}'"
    if '"' not in value and "\\" not in value:
        return f'"{value}"'
    raise ConfigError(
        f"{key} is {value!r}, which Flower cannot be told; choose a path without quotes"
    )
