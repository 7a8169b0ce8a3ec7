"""What a site with a certificate could send: damaged payloads of every codec, and calls by lot.

`payloads`: a million of each codec, damaged by a seed and with a checksum that fits
(`harness/damage.py`), go the way that they have at the coordinator: they are inspected, and what is
accepted is merged with an honest contribution, by the mean and now and then by a rule that bears
lies. Either they are refused at once, by a `PayloadError` in one line, or finite values of the
layout come of it: what was accepted and cannot be read is unexpected, too.

`calls`: sequences of calls of sites, decisions of the operator, rounds and passing time, made by
hypothesis (`tests/coordinator/test_calls.py`, which says what must hold after each). Sequences are
counted under `cases`, calls under `refused` and `accepted`.

`refused` is what an error of the tree answers, `unexpected` all else, printed as it comes: an
exception that nobody foresaw, a value that is not finite, a payload that takes more than a second
or 64 MiB. `slowest_ms`, of one payload or call, and `core_s` are processor time. A seed repeats a
payload, or 250 sequences: `--only int4 --seed 17`. `--quick`: a hundredth.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from multiprocessing import get_context
from typing import NamedTuple, cast, get_args

import torch

from benchmarks.harness.damage import (
    LAYOUTS,
    SITES,
    Good,
    damaged,
    good_payload,
    other_payloads,
)
from benchmarks.harness.fleet import peak_rss_mb
from benchmarks.harness.table import Row, select
from fedwan.codecs import Coded, Reading, codecs_by_name, plain
from fedwan.codecs.masked import KeyStreams, first_sizes
from fedwan.codecs.payload import Source
from fedwan.coordinator.intake import inspect
from fedwan.coordinator.masked import MaskedMerger
from fedwan.coordinator.merge import Merger
from fedwan.coordinator.robust import RobustMerger, Rule
from fedwan.errors import PayloadError
from fedwan.link.buffer import Buffer
from fedwan.state import Layout, Role, State

CALLS = "calls"
CHUNK = 500
SEQUENCES = 250
"""Of calls, that come of one seed."""
MOST_S = 1.0
MOST_BYTES = 64 << 20
ROBUST = 0.05
"""Of what is accepted, this share is merged by a rule that bears lies, too."""


class Tally(NamedTuple):
    found: Counter[str]
    unexpected: list[tuple[int, str]]
    slowest_s: float
    seconds: float


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--payloads", type=int, default=1_000_000, help="of each codec")
    parser.add_argument("--sequences", type=int, default=100_000, help="of calls")
    parser.add_argument("--seed", type=int, help="this one alone, of what --only says")


def measure(args: argparse.Namespace) -> Iterator[Row]:
    share = 100 if args.quick else 1
    with get_context("spawn").Pool(os.cpu_count(), torch.set_num_threads, (1,)) as pool:
        for name in select([*codecs_by_name(SITES), CALLS], args.only):
            size, num = (CHUNK, args.payloads // share)
            work: Callable[[range], Tally] = partial(fuzz_payloads, name)
            if name == CALLS:
                work, size, num = fuzz_calls, 1, -(-args.sequences // share // SEQUENCES)
            seeds = range(num) if args.seed is None else range(args.seed, args.seed + 1)
            chunks = [seeds[at : at + size] for at in range(0, len(seeds), size)]
            began_s = time.monotonic()
            tallies = []
            for tally in pool.imap_unordered(work, chunks):
                tallies.append(tally)
                for seed, text in tally.unexpected:
                    again = f"python -m benchmarks fuzz --only {name} --seed {seed}"
                    print(f"{name}: {text}\n{again}", flush=True)
            yield _row(name, tallies, time.monotonic() - began_s)


def _row(name: str, tallies: list[Tally], seconds: float) -> Row:
    found: Counter[str] = sum((tally.found for tally in tallies), Counter())
    return {
        "of": name,
        "cases": found["cases"],
        "refused": found["refused"],
        "accepted": found["accepted"],
        "unexpected": sum(len(tally.unexpected) for tally in tallies),
        "slowest_ms": round(1e3 * max(tally.slowest_s for tally in tallies), 1),
        "core_s": round(sum(tally.seconds for tally in tallies), 1),
        "seconds": round(seconds, 1),
    }


# Calls -------------------------------------------------------------------------------------------


def fuzz_calls(seeds: range) -> Tally:
    """Sequences of each seed, and the shortest that fails."""
    # Imported here: hypothesis comes with it, which payloads do without.
    from hypothesis import Phase, seed, settings
    from hypothesis.stateful import run_state_machine_as_test

    from tests.coordinator.test_calls import COUNTS, Calls, TestCalls

    COUNTS.clear()
    unexpected = []
    began_s, phases = time.process_time(), (Phase.generate, Phase.shrink)
    given = settings(TestCalls.settings, max_examples=SEQUENCES, database=None, phases=phases)
    for each in seeds:
        try:
            run_state_machine_as_test(seed(each)(Calls), settings=given)
        except Exception:
            unexpected.append((each, traceback.format_exc()))
    found = Counter(cases=COUNTS["sequences"], refused=COUNTS["refused"])
    found["accepted"] = COUNTS["calls"] - COUNTS["refused"]
    slowest_s = COUNTS["slowest_us"] / 1e6
    return Tally(found, unexpected, slowest_s, time.process_time() - began_s)


# Payloads ----------------------------------------------------------------------------------------


class Coordinator:
    """What a coordinator does with one contribution, beside an honest one."""

    def __init__(self, good: Good) -> None:
        self._codec, self._layout = good.codec, good.layout
        self._honest = [
            _decoded(good_payload(good.codec.name, good.layout, seed)) for seed in range(3)
        ]
        self._merger = Merger(good.layout)

    def accept(self, payload: Source) -> None:
        """A `PayloadError` where it is refused."""
        measures = inspect(payload, self._layout, self._codec)
        assert all(0 <= value < math.inf for value in measures.figures().values()), measures

    def merge(self, payload: Source, rng: random.Random) -> None:
        """What was accepted."""
        reading = Reading(self._codec, payload, self._layout)
        if self._codec.mask_bits:
            self._sum_up(reading)
            return
        both = [(reading, rng.choice((1.0, 0.01, 3.0)), rng.choice((1.0, 0.5)))]
        both.insert(rng.randrange(2), (self._honest[0], 1.0, 1.0))
        for each, weight, scale in both:
            self._merger.add(each, weight, scale)
        check(self._merger.take(), self._layout)
        if rng.random() < ROBUST:
            robust = RobustMerger(self._layout, rng.choice(cast(list[Rule], get_args(Rule))), 1)
            for each in (reading, *self._honest):
                robust.add(each)
            check(robust.take(), self._layout)

    def _sum_up(self, reading: Reading) -> None:
        merger = MaskedMerger(self._layout, self._codec, SITES)
        merger.add(self._honest[0])
        merger.add(reading)
        merged, sizes = merger.open(KeyStreams([]), first_sizes(self._layout))
        check(merged, self._layout)
        assert all(1 <= size <= 1023 for size in sizes), sizes


def _decoded(good: Good) -> list[tuple[str, Coded]]:
    """An honest contribution; under masks as it came."""
    read = Reading(good.codec, source_of(good.data), good.layout)
    return list(read if good.codec.mask_bits else plain({n: c.tensor() for n, c in read}).items())


def source_of(data: bytes) -> Source:
    """As it lies at the coordinator."""
    buffer = Buffer(len(data))
    buffer.write(0, data)
    return buffer


def check(merged: State, layout: Layout) -> None:
    """What is to be the global weights: finite values of the layout."""
    assert list(merged) == list(layout)
    for name, value in merged.items():
        spec = layout[name]
        assert value.shape == spec.shape, f"{name} is of shape {value.shape}"
        assert bool(value.isfinite().all()), f"{name} is {value}"
        assert spec.role is not Role.VARIANCE or not bool((value < 0).any()), f"{name} is {value}"


@cache
def _good(name: str) -> tuple[list[Good], list[bytes]]:
    """One of each layout, and others; made once in a process."""
    return [good_payload(name, layout) for layout in LAYOUTS], other_payloads()


def _take(name: str, seed: int, coordinators: list[Coordinator]) -> str:
    rng = random.Random(f"{name} {seed}")
    good, others = _good(name)
    which = rng.randrange(len(good))
    payload = source_of(damaged(rng, good[which], others))
    try:
        coordinators[which].accept(payload)
    except PayloadError as error:
        text = str(error)
        assert text.isprintable() and len(text) < 600, text
        return "refused"
    coordinators[which].merge(payload, rng)
    return "accepted"


def fuzz_payloads(name: str, seeds: range) -> Tally:
    coordinators = [Coordinator(good) for good in _good(name)[0]]
    found, unexpected, slowest_s = Counter(cases=len(seeds)), [], 0.0
    peak, first_s = peak_rss_mb(), time.process_time()
    for seed in seeds:
        began_s = time.process_time()
        try:
            found[_take(name, seed, coordinators)] += 1
        except Exception:
            unexpected.append((seed, traceback.format_exc()))
            coordinators = [Coordinator(good) for good in _good(name)[0]]
        took_s = time.process_time() - began_s
        slowest_s = max(slowest_s, took_s)
        if took_s > MOST_S:
            unexpected.append((seed, f"took {took_s:.1f} s"))
    if (grown := 1e6 * (peak_rss_mb() - peak)) > MOST_BYTES:
        text = f"it, or one of the next {len(seeds)}, took {grown:.0f} bytes"
        unexpected.append((seeds[0], text))
    return Tally(found, unexpected, slowest_s, time.process_time() - first_s)
