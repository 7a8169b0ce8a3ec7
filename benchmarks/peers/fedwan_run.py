"""fedwan itself, with Flower left out: the coordinator's service and the sites', a process each.

As `harness/party.py` has them. Strategy, codecs, the link's channels and all else are words of the
configuration (`Spec.words`, e.g. `strategy=diloco codec.up=fp32`). An observer is put into the
coordinator, and changes nothing: its average is looked at after each of its updates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.harness.fleet import save_json
from benchmarks.harness.party import coordinate, take_part
from benchmarks.peers.part import PORTS, Curve, Spec, config_of, enter, open_part, save_site
from fedwan.config import dump, merge
from fedwan.coordinator.model import GlobalModel


def serve(spec: Spec, folder: Path) -> None:
    # It does not evaluate on the training's time.
    link = {"listen": f"{spec.hosts[0]}:{PORTS[0]}"}
    own = {"out": str(folder / "out"), "eval": {"every": 0}, "link": link}
    config = merge(config_of(spec), own)
    dump(config, folder / "config.yaml")
    curve = Curve(open_part(spec, 0, config), spec)
    commit = GlobalModel.commit

    def commit_and_look(self: GlobalModel, *args: Any, **options: Any) -> Any:
        before = min(self.versions)
        payload = commit(self, *args, **options)
        if (version := min(self.versions)) > before:
            curve.look(version * spec.h, self.ema, self.state)
        return payload

    with mock.patch.object(GlobalModel, "commit", commit_and_look):
        coordinate(folder)
    save_json(folder / "coordinator.json", curve.measure())


if __name__ == "__main__":
    spec, folder, who = enter()
    if who == "coordinator":
        serve(spec, folder)
    else:
        save_site(folder, int(who[1:]) - 1, take_part(folder, who)["sha256"])
