"""The app's bundle (FAB): what Flower carries from a coordinator to sites, and which they take.

It holds the two entry points that Flower starts, and nothing else. What they call is the fedwan,
and the recipes, that are installed at the coordinator and each site. The same version makes the
same bundle from a checkout and from a wheel, so that a site knows what it will be sent.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Collection
from pathlib import Path

from fedwan.app import installed_app
from fedwan.errors import ConfigError


def build_fab(app: Path) -> bytes:
    """The bundle of the app in a folder with `pyproject.toml`: what its `fab-include` names."""
    from flwr.cli.build import build_fab_from_files

    project = app / "pyproject.toml"
    try:
        settings = tomllib.loads(project.read_text())["tool"]["flwr"]["app"]
        names = [project.name, *settings["fab-include"]]
    except (OSError, tomllib.TOMLDecodeError, KeyError) as error:
        raise ConfigError(
            f"{app} is no fedwan app ({project.name}: {type(error).__name__} {error}); "
            "install fedwan anew (pip install fedwan)"
        ) from error
    content, _ = build_fab_from_files({name: app / name for name in names})
    return bytes(content)


def check_bundle(answer: bytes, allowed: Collection[str]) -> None:
    """Check a `GetFabResponse`, before anybody unpacks it.

    A `ConfigError` unless it is the bundle of the installed fedwan, or the SHA-256 of its bytes, in
    hexadecimal, is allowed.
    """
    from flwr.proto.fab_pb2 import GetFabResponse
    from google.protobuf.message import DecodeError

    try:
        found = hashlib.sha256(GetFabResponse.FromString(answer).fab.content).hexdigest()
    except DecodeError:
        raise ConfigError("the coordinator sent no bundle where one was asked for") from None
    own = hashlib.sha256(build_fab(installed_app())).hexdigest()
    if found != own and found not in allowed:
        raise ConfigError(
            f"the coordinator's code for sites has SHA-256 {found}, that of the fedwan installed "
            f"here {own}; install the same version at both, or, if you have read that code, add a "
            f"line bundles: [{found}] to SITE.yaml"
        )
