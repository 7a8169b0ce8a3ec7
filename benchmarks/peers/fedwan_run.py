"""fedwan itself, with Flower left out: the coordinator's service and the sites', a process each.

As `harness/party.py` has them. Strategy, codecs, the link's channels and all else are words of the
configuration (`Spec.words`, e.g. `strategy=diloco codec.up=fp32`). An observer is put into the
coordinator, and changes nothing: its average is looked at after each of its updates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness.fleet import load_json, save_json
from benchmarks.harness.party import coordinate, take_part
from benchmarks.peers.part import PORTS, Curve, Spec, config_of, enter, open_part, save_site
from fedwan.config import Config, dump, merge
from fedwan.coordinator.model import GlobalModel
from fedwan.link import pki


def prepare(spec: Spec, folder: Path) -> None:
    sites = [f"s{index + 1}" for index in range(spec.sites)]
    pki.federation(folder / "pki", [spec.hosts[0]], sites)


def settle(spec: Spec, folder: Path) -> Config:
    """The run's configuration: where it listens, and no evaluation on the training's time."""
    link = {"listen": f"{spec.hosts[0]}:{PORTS[0]}"}
    return merge(config_of(spec), {"out": str(folder / "out"), "eval": {"every": 0}, "link": link})


def serve(spec: Spec, folder: Path) -> None:
    config = settle(spec, folder)
    dump(config, folder / "config.yaml")
    curve = Curve(open_part(spec, 0, config), spec)
    observe(curve, spec.h)
    coordinate(folder)
    summary = load_json(folder / "out" / "summary.json")
    save_json(folder / "coordinator.json", {"summary": summary} | curve.measure())


def observe(curve: Curve, h: int) -> None:
    """Look at the average after each update that completes a version."""
    commit = GlobalModel.commit

    def commit_and_look(self: GlobalModel, *args: Any, **options: Any) -> Any:
        before = min(self.versions)
        payload = commit(self, *args, **options)
        if (version := min(self.versions)) > before:
            curve.look(version * h, self.ema)
            curve.check(version * h, self.state)
        return payload

    GlobalModel.commit = commit_and_look  # type: ignore[method-assign]


def gather(spec: Spec, folder: Path) -> None:
    """Put what the coordinator saw beside what the first site did, as the other systems have it."""
    path = folder / "site0.json"
    save_json(path, load_json(path) | load_json(folder / "coordinator.json"))


if __name__ == "__main__":
    spec, folder, who = enter()
    if who == "coordinator":
        serve(spec, folder)
    else:
        save_site(folder, int(who), take_part(folder, f"s{int(who) + 1}")["sha256"])
