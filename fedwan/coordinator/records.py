"""What a run tells: its totals, rows of its rounds, and versions for its journal."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from fedwan.coordinator.intake import Contribution
from fedwan.coordinator.model import GlobalModel
from fedwan.doctor.diagnosis import Doctor
from fedwan.doctor.sampling import Direction, Directions, Sample, no_direction
from fedwan.fragments import Fragment
from fedwan.link import wire_pb2 as wire
from fedwan.output.records import SPENT, Record
from fedwan.privacy import EPSILON
from fedwan.protocol.evidence import fields_of
from fedwan.protocol.limits import Names
from fedwan.protocol.round import Merge, Round


@dataclass
class Totals:
    """Sums over the run; part of every checkpoint."""

    compute_s: float = 0.0
    wait_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    contributions: int = 0
    rejected: int = 0
    rejoins: int = 0
    samples: int = 0
    """Behind all contributions."""
    late: int = 0
    """Contributions that were merged into a later version than the one they were made for."""
    staleness: int = 0
    """Versions by which contributions were late, summed."""
    dropped: int = 0
    """Contributions that came too late to be merged."""
    wall_s: float = 0.0
    evaluation_s: float = 0.0
    """Of all evaluations; of one by several sites, the longest."""
    epsilon: float = 0.0
    """The most that a unit has spent of its privacy, as sites say of samples."""
    quality: dict[str, Any] = field(default_factory=dict)
    quality_version: int = -1
    sites: dict[str, dict[str, int]] = field(default_factory=dict)
    """Contributions and their bytes."""

    def add_work(self, work: wire.Work | Totals) -> None:
        """Count what a site did since its last contribution, or what several did."""
        for name in SPENT:
            setattr(self, name, getattr(self, name) + getattr(work, name))

    def add_round(self, merged: Sequence[Merge[Contribution]]) -> None:
        """Count what was merged."""
        for key, contribution, staleness, _ in merged:
            work = contribution.work
            site = self.sites[key.site] = self.of_site(key.site)
            self.add_work(work)
            site["contributions"] += 1
            site["bytes_up"] += work.bytes_up
            site["bytes_down"] += work.bytes_down
            self.contributions += 1
            self.samples += work.samples
            self.epsilon = max(self.epsilon, work.figures.get(EPSILON, 0.0))
            self.late += staleness > 0
            self.staleness += staleness

    def of_site(self, site: str) -> dict[str, int]:
        """What has been merged of one site. Any thread may ask."""
        return self.sites.get(site, {"contributions": 0, "bytes_up": 0, "bytes_down": 0})


@dataclass
class RoundRows:
    """Writes a row for each contribution, and one for each thing that the doctor finds."""

    record: Callable[[dict[str, Any]], None]
    untold: Sequence[str] = ()
    """Of `Direction`, what says nothing under the run's strategy."""
    _directions: dict[int, Directions] = field(default_factory=dict)
    _doctor: Doctor = field(default_factory=Doctor)
    _names: Names = field(default_factory=Names)

    def recall(self, records: Iterable[Record]) -> None:
        """A run goes on, which has recorded these."""
        self._doctor.recall(records)

    def add(
        self,
        round_: Round[Contribution],
        samples: Sequence[Sample],
        before: Sample,
        run_step: int,
        round_s: float,
    ) -> None:
        """A round has ended."""
        index = round_.fragment.index
        directions = self._directions.setdefault(index, Directions())
        # Of a site that also sent one late, the fresh one.
        by_age = sorted(zip(round_.merged, samples, strict=True), key=lambda m: -m[0].staleness)
        latest = {merge.key.site: (merge.key, sample) for merge, sample in by_age}
        compared = directions.compare({site: found[1] for site, found in latest.items()}, before)
        shared = {
            "kind": "round",
            "version": round_.version + 1,
            "run_step": run_step,
            "fragment": index,
            "round_s": round_s,
        }
        nothing: dict[str, Any] = {key: {} for key in self.untold}
        rows = []
        for merge in round_.merged:
            key, _ = latest[merge.key.site]
            direction = compared[key.site] if key == merge.key else no_direction()
            rows.append(shared | _row(merge, direction, self._names) | nothing)
            self.record(rows[-1])
        for row in self._doctor.look(rows):
            self.record(row)


def _row(merge: Merge[Contribution], direction: Direction, names: Names) -> dict[str, Any]:
    site, work = merge.key.site, merge.contribution.work
    return {
        "site": site,
        "step": work.step,
        "samples": work.samples,
        "losses": names.keep(site, "losses", work.losses),
        **{name: getattr(work, name) for name in SPENT},
        "norms": merge.contribution.measures.norms,
        "staleness": merge.staleness,
        "figures": names.keep(site, "figures", work.figures),
        **direction,
    }


class VersionLines:
    """Tells the journal of versions in a thread: hashing what moved takes long in large models.

    Nothing may move the weights between `add` and the end of `wait`.
    """

    def __init__(self, record: Callable[[dict[str, Any]], None], flush: Callable[[], None]) -> None:
        """`flush` writes what was told before, such as the certificates of what has come since."""
        self._record, self._flush = record, flush
        self.thread = ThreadPoolExecutor(1, "journal")
        self._writing: list[Future[None]] = []

    def add(
        self, model: GlobalModel, fragment: Fragment, contributions: Sequence[dict[str, Any]] = ()
    ) -> None:
        """A fragment has a new version, made of these."""
        version = model.versions[fragment.index]

        def write() -> None:
            weights = model.hash_of(fragment)
            line = {"event": "version", "site": None, "version": version, "weights": weights}
            self._flush()
            for row in (*contributions, line):
                self._record({"kind": "event", "fragment": fragment.index, **row})

        self._writing.append(self.thread.submit(write))

    def wait(self) -> None:
        """Until the lines are on disk; raises what went wrong."""
        while self._writing:
            self._writing.pop().result()


def contribution_row(merge: Merge[Contribution], share: tuple[float, float]) -> dict[str, Any]:
    """For the journal, by its weight and scale."""
    _, work, _, payload_hash, signature, bundle = merge.contribution
    row = {"event": "contribution", **fields_of(merge.key, payload_hash, work, bundle)}
    row["weight"] = math.prod(share)
    if EPSILON in work.figures:
        row["epsilon"] = work.figures[EPSILON]
    return row | ({"signature": b64encode(signature).decode()} if signature else {})
