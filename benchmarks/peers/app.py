"""A folder with fedwan's recipes and this benchmark's beside them, as a user's own app has them."""

from __future__ import annotations

from pathlib import Path

__all__ = ["ROOT", "lay_app"]

ROOT = Path(__file__).resolve().parents[2]


def lay_app(folder: Path) -> Path:
    """Make the app in an empty folder; processes find its recipes when they run there."""
    (folder / "sites").mkdir(parents=True)
    (folder / "strategies").symlink_to(ROOT / "strategies")
    own = Path(__file__).parent / "recipes"
    recipes = [path for path in own.glob("*.py") if path.stem != "__init__"]
    for path in (*(ROOT / "sites").glob("*.py"), *recipes):
        (folder / "sites" / path.name).symlink_to(path)
    return folder
