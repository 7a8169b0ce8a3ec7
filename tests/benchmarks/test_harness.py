"""The benchmarks' one harness: command, rows, processes."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import quality, strategies, unequal
from benchmarks.__main__ import MODULES
from benchmarks.harness.fleet import Process, run_fleet, run_processes
from benchmarks.harness.table import (
    half_interval,
    mean_of,
    measure_all,
    ratio_half_interval,
    read_arguments,
    run,
    seeds_of,
    select,
)
from fedwan.app import load_run
from fedwan.errors import FedwanError, UserError


def benchmark() -> Any:
    def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
        yield {"name": "a", "value": 1.0, "all": [1, 2]}
        yield {"name": "b", "value": 3.0, "all": [3]}

    def summarise(rows: list[dict[str, Any]]) -> list[str]:
        return [f"mean {mean_of(rows, 'value'):g}"]

    return SimpleNamespace(__doc__="Doc.", measure=measure, summarise=summarise)


def test_a_benchmark_prints_rows_and_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "rows.json"
    run(benchmark(), read_arguments(benchmark(), "x", ["--json", str(path)]))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["name"] for row in rows] == ["a", "b"] and rows[0]["all"] == [1, 2]
    header, _, first, *_, last = capsys.readouterr().out.splitlines()
    assert header.split()[1::2] == ["name", "value"] and first.split()[1::2] == ["a", "1"]
    assert last == "mean 2"


@pytest.mark.parametrize("name", MODULES)
def test_every_benchmark_has_a_command_line(name: str) -> None:
    module = import_module(f"benchmarks.{MODULES[name]}")
    assert callable(getattr(module, "measure", None) or module.measure_case) and module.__doc__
    assert read_arguments(module, name, ["--quick"]).quick


def test_cases_and_seeds_that_there_are_not_are_refused() -> None:
    assert select({"one a": 1, "one b": 2, "two": 3}, "one") == [1, 2]
    with pytest.raises(UserError, match="'three' is in none of: one; two"):
        select({"one": 1, "two": 2}, "three")
    for words, seeds in (
        ("", range(5)),
        ("--quick", range(1)),
        ("--quick --seeds 3", range(3)),
        ("--fresh --seeds 10", range(100, 110)),
    ):
        assert seeds_of(read_arguments(unequal, "unequal", words.split())) == seeds
    with pytest.raises(UserError, match="would mix"):
        seeds_of(read_arguments(unequal, "unequal", ["--seeds", "101"]))


@pytest.mark.parametrize(
    "name", sorted(MODULES.keys() - {"chaos", "fuzz"})
)  # root, a pool of processes
def test_every_benchmark_follows_only(name: str) -> None:
    module = import_module(f"benchmarks.{MODULES[name]}")
    more = ["--accountant"] * (name == "privacy")
    with pytest.raises(UserError, match="'nonsense' is in none of"):
        next(measure_all(module, read_arguments(module, name, ["--only", "nonsense", *more])))


def test_an_interval_is_students_and_a_ratios_leaves_out_what_a_seed_does_to_both() -> None:
    assert half_interval([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert math.isnan(half_interval([1.0]))
    assert ratio_half_interval([1.1, 2.2, 3.3], [1.0, 2.0, 3.0]) == pytest.approx(0, abs=1e-9)
    apart = ratio_half_interval([3.3, 2.2, 1.1], [1.0, 2.0, 3.0])
    assert apart == pytest.approx(half_interval([2.2, 0.0, -2.2]) / 2)


@pytest.mark.slow
def test_every_run_of_the_tables_can_be_configured() -> None:
    coded = (words for words, *_ in strategies.CODED.values())
    for words in (*strategies.CASES.values(), *unequal.CASES.values(), *coded):
        load_run(None, ["workload=flow", "sites=4", *words])
    for words in {tuple(c.words(is_sync)) for c in quality.CASES for is_sync in (False, True)}:
        if not any(quality.TEACHER in word for word in words):
            load_run(None, words)


def processes(service: str, site: str) -> list[Process]:
    python = [sys.executable, "-c"]
    return [
        Process("service", [*python, service], is_service=True),
        Process("site", [*python, site]),
    ]


def test_a_process_that_fails_ends_the_others_and_its_last_words_are_told(tmp_path: Path) -> None:
    sleeping, failing = "import time; time.sleep(60)", "print('no luck'); exit(3)"
    began = time.monotonic()
    with pytest.raises(FedwanError, match="site ended with status 3: no luck"):
        run_processes(processes(sleeping, failing), tmp_path, 60)
    run_processes(processes(sleeping, ""), tmp_path, 60)  # a service is ended when all is done
    with pytest.raises(FedwanError, match="service ended with status 0"):
        run_processes(processes("", sleeping), tmp_path, 60)
    assert time.monotonic() - began < 50


@pytest.mark.slow
def test_a_fleet_trains_to_its_end_and_leaves_its_figures() -> None:
    words = "workload=flow data.name=ring8 model.width=8 model.depth=1 sites=1 h=2 steps=4"
    ran = run_fleet([*words.split(), "eval.every=0"], threads=1)
    assert ran.summary["rounds"] == 2
    assert ran.parties["s1"]["sha256"] == ran.summary["global_sha256"]
