"""Secure aggregation: what masks cost in bytes and seconds, and that they come off every time.

Four sites send a contribution of pix2pix's size (57,182,660 values, drawn as `codecs` draws them),
under masks, plainly in int4, and as Flower 1.41's SecAgg+ has it by default (its own functions:
quantisation to 22 bits, masks of numpy's generator modulo 2^32, as 64-bit integers on the wire; no
federation runs). One core. A site's seconds are coding and masks; the coordinator's are adding up
four of them and taking the masks off.

`dropouts`: five sites, 300 values, other masks and deltas in each version; each site sends or does
not, and then answers the coordinator's two questions or not, by lot, until there are 10,000 sums.
Equal is a sum that is, bit for bit, that of the integers which its sites have rounded to; in
`short` ones too few have answered.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.codecs import pix2pix_delta, pix2pix_layout
from benchmarks.harness.table import Row
from benchmarks.peers.flower_secagg import measure_flower
from fedwan.codecs import codec_by_name, with_feedback
from fedwan.codecs.masked import FIRST_SIZE, KeyStreams, first_sizes, size_of, step_of
from fedwan.coordinator.masked import MaskedMerger, key_streams
from fedwan.coordinator.merge import Merger
from fedwan.link import pki
from fedwan.link.tls import Identity
from fedwan.protocol.unmasking import Unmasking, basis_of, majority
from fedwan.site.masker import Masker
from fedwan.state import Layout, Role, State, TensorSpec, clone

SITES = 4
STEP = step_of(FIRST_SIZE, 4)
CASES = ("masked3", "masked4", "masked6", "masked8", "int4", "flower", "dropouts")
"""Ways of sending, and the count of sums."""


def measure_case(args: argparse.Namespace, case: str, seed: int) -> Row:
    if case == "dropouts":
        return measure_dropouts(300 if args.quick else 10_000)
    values = pix2pix_delta("cpu")
    layout = pix2pix_layout()
    if case == "flower":
        cost = measure_flower([values[name].numpy() for name in layout], SITES)
    else:
        cost = measure_way(case, layout, values)
    num_bytes, site_s, coordinator_s = cost
    num_values = sum(spec.num_values for spec in layout.values())
    return {
        "way": case,
        "mb_site": round(num_bytes / 1e6, 1),
        "site_s": round(site_s, 2),
        "fp32_mb_s": round(4e-6 * num_values / site_s),
        "coordinator_s": round(coordinator_s, 2),
    }


def maskers_of(names: list[str], folder: Path) -> dict[str, Masker]:
    """All sites of a run, which have met."""
    pki.federation(folder, [], names)
    maskers = {
        n: Masker(Identity.load(folder / n), "run", names, majority(len(names)), folder / n)
        for n in names
    }
    for masker in maskers.values():
        masker.meet([each.card() for each in maskers.values()], 1)
    return maskers


def measure_way(way: str, layout: Layout, values: State) -> tuple[int, float, float]:
    """Bytes of a site, its seconds, and the coordinator's."""
    names, codec = [f"s{i}" for i in range(SITES)], codec_by_name(way, SITES)
    merger: Any = MaskedMerger(layout, codec, SITES) if codec.mask_bits else Merger(layout)
    sizes = b"".join(
        np.uint16(size_of(float(values[name].square().mean().sqrt()))).tobytes() for name in layout
    )
    with tempfile.TemporaryDirectory() as folder:
        maskers = maskers_of(names, Path(folder)) if codec.mask_bits else {}
        bundles, site_s, coordinator_s = {}, [], 0.0
        for name in names:
            spare = clone(values)
            began = time.perf_counter()
            coder = with_feedback(codec)
            if maskers:
                coder, bundles[name] = maskers[name].seal(codec, 0, 0, "", sizes)
            payload, _ = coder.encode(spare, {}, layout)
            site_s.append(time.perf_counter() - began)
            began = time.perf_counter()
            merger.add(codec.read_each(payload, layout), 1.0)
            coordinator_s += time.perf_counter() - began
        began = time.perf_counter()
        if maskers:
            merger.open(ask(maskers, 0, sizes, bundles, names), sizes)
        else:
            merger.take()
        coordinator_s += time.perf_counter() - began
    return payload.num_bytes, sorted(site_s)[SITES // 2], coordinator_s


def ask(
    maskers: dict[str, Masker], version: int, sizes: bytes, bundles: Any, answering: list[str]
) -> KeyStreams | None:
    """Put both of the coordinator's questions to some sites; the masks, if enough answer."""
    names = list(maskers)
    asked = Unmasking(names, majority(len(names)), 0, version, basis_of("", sizes), bundles)
    for _ in ("sign", "reveal"):
        for name in answering:
            if (question := asked.question(name, 0, version + 1)) is not None:
                asked.hear(name, maskers[name].answer(question))
    return key_streams(asked, names, bundles)


def measure_dropouts(num_sums: int) -> Row:
    names, dice = [f"s{i}" for i in range(5)], random.Random(0)
    version = sums = equal = short = 0
    layout: Layout = {"net/w": TensorSpec((300,), torch.float32, Role.PARAMETER)}
    codec, sizes = codec_by_name("masked4", len(names)), first_sizes(layout)
    with tempfile.TemporaryDirectory() as folder:
        maskers = maskers_of(names, Path(folder))
        while sums < num_sums:
            version += 1
            senders = [name for name in names if dice.random() < 0.8]
            if len(senders) < majority(len(names)):
                continue  # no quorum
            merger, bundles, total = MaskedMerger(layout, codec, len(names)), {}, torch.zeros(300)
            for name in senders:
                coder, bundles[name] = maskers[name].seal(codec, 0, version, "", sizes)
                delta = 0.01 * torch.randn(300)
                payload, owed = coder.encode({"net/w": delta.clone()}, {}, layout)
                merger.add(codec.read_each(payload, layout))
                total += ((delta - owed["net/w"]) / STEP).round()
            answering = [name for name in senders if dice.random() < 0.85]
            masks = ask(maskers, version, sizes, bundles, answering)
            if masks is None:  # the round waits for who is silent
                short += 1
                continue
            merged, _ = merger.open(masks, sizes)
            sums += 1
            equal += torch.equal(merged["net/w"], total * (STEP / len(senders)))
    counts = {"versions": version, "sums": sums, "equal": equal, "short": short}
    return {"way": "dropouts", **counts}
