"""`fedwan plan` from outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedwan.app import load_run
from fedwan.planner import costs
from tests.cli.conftest import Command
from tests.planner.test_links import FOUND, asdict

MODEL = ("params=57182660", "step_s=0.1")
LINK = ("link.rate_mbit=100", "link.rtt_ms=100")
SMALL = ("strategy=streaming_diloco", "codec.up=int4", "codec.down=int4")


def test_a_table_and_a_recommendation(fedwan: Command) -> None:
    words = ("sites=4", *LINK, "h=50", "codec.up=int4", "usd_per_gb=0.05", "--all")
    code, out, err = fedwan("plan", *MODEL, *words)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("57,182,660 values, steps of 0.1 s, 4 sites; payloads get 88.4 Mbit")
    assert lines[2].split()[:4] == ["strategy", "codec", "H", "fragments"]
    assert lines[2].endswith("cost") and "$" in lines[3]
    assert lines[-2].startswith("advice: take streaming_diloco, int4, H = 50, 10 fragments")
    for name in ("local_sgd", "diloco", "streaming_diloco", "eager_diloco"):
        assert any(name in line for line in lines[3:-2])


def test_rows_and_words_that_run(fedwan: Command, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    code, out, _ = fedwan("plan", *MODEL, *LINK, *SMALL, "h=50", "--json", str(rows))
    best, *_ = [json.loads(line) for line in rows.read_text().splitlines()]
    assert code == 0 and best["strategy"] == "streaming_diloco" and best["usd"] is None
    words = out.splitlines()[-1].removeprefix("words: ").split()
    # The default workload has fewer modules than the model that was planned for.
    run = load_run(None, [*words, "stream.fragments=2"])
    assert (run.strategy, run.h, run.codec.up) == ("streaming_diloco", best["h"], "int4")
    assert run.stream.tau == best["tau"]


def test_a_config_s_workload_is_measured_and_words_beat_the_file(
    fedwan: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "BUDGET_S", 0.0)
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: {name: ring8}\nstrategy: diloco\nh: 25\nsteps: 1000\nsites: 2\n"
        "model: {width: 4}\nouter: {generator: {lr: 0.3}}\nlink: {rate_mbit: 20, rtt_ms: 50}\n"
    )
    code, out, err = fedwan("plan", str(path), "strategy=local_sgd", "link.rtt_ms=70")
    assert (code, err) == (0, "")
    assert ", 70 ms; 1,000 steps" in out and "advice: " in out
    assert out.splitlines()[-1].startswith("words: strategy=local_sgd h=")


def test_a_file_s_experts_are_compared_with_nothing_that_trains_another_model(
    fedwan: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "BUDGET_S", 0.0)
    path = tmp_path / "run.yaml"
    path.write_text(
        "workload: flow\nstrategy: experts\nsites: 2\nsteps: 1000\ndata: {name: ring8}\n"
        "model: {width: 4}\nlink: {rate_mbit: 20, rtt_ms: 50}\n"
    )
    code, out, err = fedwan("plan", str(path), "h=50")
    assert (code, err) == (0, "")
    rows = out.splitlines()[3:-3]
    assert rows and all(row.startswith(("experts ", "* not yet")) for row in rows if row)
    assert "take experts" in out.splitlines()[-2]
    assert "take local_sgd" in fedwan("plan", str(path), "strategy=local_sgd")[1]


def test_a_measured_link_takes_the_place_of_a_described_one(
    fedwan: Command, tmp_path: Path
) -> None:
    path = tmp_path / "link.json"
    path.write_text(json.dumps(asdict(FOUND) | {"advice": None}))
    code, out, _ = fedwan("plan", *MODEL, *SMALL, "h=50", "--link", str(path))
    assert code == 0 and "payloads get 88.5 Mbit/s up and 39.3 down, 100 ms" in out
    code, _, err = fedwan("plan", *MODEL, *LINK, "--link", str(path))
    assert code == 2 and "link.rate_mbit has no effect: --link tells" in err


def test_what_cannot_be_is_refused_before_the_workload_is_timed(
    fedwan: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "step_seconds", lambda *_: pytest.fail("it was timed"))
    path = tmp_path / "run.yaml"
    path.write_text("sites: 2\nlink: {rate_mbit: 20}\n")
    for words, says in (
        (("h=20", "stream.tau=20"), "needs stream.tau=19 or less"),
        (("params=3",), "params = 3 has no effect"),
        (("workload=command",), "is of a script, whose steps cannot be timed here"),
        (("network.discriminator.h=5",), "network.discriminator.h=5 cannot be planned for"),
    ):
        code, out, err = fedwan("plan", str(path), *words)
        assert (code, out) == (2, "") and says in err
