"""`fedwan plan` from outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedwan.app import load_run
from fedwan.errors import ConfigError
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
    assert lines[-1].startswith("advice: take streaming_diloco, int4, H = 50, 10 fragments")
    for name in ("local_sgd", "diloco", "streaming_diloco", "eager_diloco"):
        assert any(name in line for line in lines[3:-2])


def test_rows_and_a_config_that_runs(fedwan: Command, tmp_path: Path) -> None:
    rows, config = tmp_path / "rows.json", tmp_path / "run.yaml"
    words = (*MODEL, *LINK, *SMALL, "h=50", "--json", str(rows), "--yaml", str(config))
    assert fedwan("plan", *words)[0] == 0
    best, *_ = [json.loads(line) for line in rows.read_text().splitlines()]
    assert best["strategy"] == "streaming_diloco" and best["usd"] is None
    # The default workload has fewer modules than the model that was planned for.
    with pytest.raises(ConfigError, match="workload = 'your_workload' is none of"):
        load_run(config, [])
    run = load_run(config, ["workload=gan", "stream.fragments=2"])
    assert (run.strategy, run.h, run.codec.up) == ("streaming_diloco", best["h"], "int4")
    assert run.stream.tau == best["tau"] and run.link.rate_mbit == 100.0


def test_a_config_s_workload_is_measured_and_its_own_settings_are_told(
    fedwan: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "BUDGET_S", 0.0)
    path, chosen = tmp_path / "run.yaml", tmp_path / "chosen.yaml"
    path.write_text(
        "data: {name: ring8}\nstrategy: diloco\nh: 25\nsteps: 1000\nsites: 2\nout: runs/old\n"
        "model: {width: 4}\nouter: {generator: {lr: 0.3}}\nlink: {rate_mbit: 20, rtt_ms: 50}\n"
    )
    words = ("strategy=local_sgd", "link.rtt_ms=70")
    code, out, err = fedwan("plan", str(path), *words, "--yaml", str(chosen))
    assert (code, err) == (0, "")
    assert "as configured: diloco, fp32, H = 25: sites compute" in out
    assert "advice: " in out and "local_sgd" in out
    run = load_run(chosen, [])
    assert (run.strategy, run.model["width"], run.data.name) == ("local_sgd", 4, "ring8")
    assert (run.link.rtt_ms, run.link.rate_mbit, run.out) == (70, 20, "runs/demo")


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
    assert "as configured: experts" in out and "take experts" in out.splitlines()[-1]
    assert "take local_sgd" in fedwan("plan", str(path), "strategy=local_sgd")[1]


def test_a_measured_link_takes_the_place_of_a_described_one(
    fedwan: Command, tmp_path: Path
) -> None:
    path = tmp_path / "link.json"
    path.write_text(json.dumps(asdict(FOUND)))
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
