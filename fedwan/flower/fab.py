"""The app bundle (FAB): the two entry points that Flower starts, and nothing else.

What they call is the fedwan, and the recipes, that are installed at the coordinator and each site:
no code travels. The same version makes the same bundle from a checkout and from a wheel.

Built from what `fab-include` names, so that nothing beside it can slow it or make Flower refuse it.
"""

from __future__ import annotations

import tomllib
from pathlib import Path, PurePosixPath

from fedwan.errors import ConfigError

__all__ = ["build_fab", "code_files"]


def code_files(app: Path) -> dict[str, Path]:
    """Files of an app that its bundle may hold: path inside the app -> file.

    Args:
        app: folder with `pyproject.toml`.

    Raises:
        ConfigError: there is no `pyproject.toml` with a `[tool.flwr.app]` table.
    """
    project = app / "pyproject.toml"
    try:
        settings = tomllib.loads(project.read_text())["tool"]["flwr"]["app"]
    except (OSError, tomllib.TOMLDecodeError, KeyError) as error:
        raise ConfigError(
            f"{app} is no fedwan app ({project.name}: {type(error).__name__} {error}); "
            "install fedwan anew (pip install fedwan)"
        ) from error
    files = {project.name: project}
    for pattern in settings.get("fab-include", ["**/*.py"]):
        for path in sorted(_below(app, pattern)):
            files[path.relative_to(app).as_posix()] = path
    return files


def build_fab(app: Path) -> bytes:
    """The app's bundle, the same bytes for the same code.

    Raises:
        ConfigError: Flower refuses the app; its reason is in the text.
    """
    from flwr.cli.build import build_fab_from_files

    try:
        content, _ = build_fab_from_files(code_files(app))
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{app / 'pyproject.toml'} makes no Flower app: {reason}") from error
    return bytes(content)


def _below(app: Path, pattern: str) -> list[Path]:
    """Regular files under the fixed first folders of a pattern such as `sites/**/*.py`."""
    fixed = []
    for part in PurePosixPath(pattern.lstrip("/")).parts:
        if any(letter in part for letter in "*?["):
            break
        fixed.append(part)
    start = app.joinpath(*fixed)
    if start.is_file():
        return [start]
    return [path for path in start.rglob("*") if path.is_file() and not path.is_symlink()]
