"""`fedwan plan` from outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedwan.app import load_run
from fedwan.cli.main import main
from fedwan.errors import ConfigError
from fedwan.planner import costs
from tests.planner.test_links import FOUND, asdict

MODEL = ("params=57182660", "step_s=0.1")
LINK = ("link.rate_mbit=100", "link.rtt_ms=100")
SMALL = ("strategy=streaming_diloco", "codec.up=int4", "codec.down=int4")


def fedwan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(("plan", *words))
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


def test_a_table_and_a_recommendation(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = fedwan(capsys, *MODEL, "sites=4", *LINK, "usd_per_gb=0.05", "--all")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("57,182,660 values, steps of 0.1 s, 4 sites; payloads get 88.4 Mbit")
    assert lines[2].split()[:4] == ["strategy", "codec", "H", "fragments"]
    assert lines[2].endswith("cost") and "$" in lines[3]
    assert lines[-1].startswith("advice: take streaming_diloco, int4, H = 50, 10 fragments")
    for name in ("sync", "local_sgd", "diloco", "streaming_diloco", "eager_diloco"):
        assert any(name in line for line in lines[3:-2])


def test_rows_and_a_config_that_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows, config = tmp_path / "rows.json", tmp_path / "run.yaml"
    words = (*MODEL, *LINK, *SMALL, "--json", str(rows), "--yaml", str(config))
    assert fedwan(capsys, *words)[0] == 0
    best, *_ = [json.loads(line) for line in rows.read_text().splitlines()]
    assert best["strategy"] == "streaming_diloco" and best["usd"] is None
    # The default workload has fewer modules than the model that was planned for.
    with pytest.raises(ConfigError, match="workload = 'your_workload' is none of"):
        load_run(config, [])
    run = load_run(config, ["workload=gan", "stream.fragments=2"])
    assert (run.strategy, run.h, run.codec.up) == ("streaming_diloco", best["h"], "int4")
    assert run.stream.tau == best["tau"] and run.link.rate_mbit == 100.0


def test_a_config_s_workload_is_measured_and_its_own_settings_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "BUDGET_S", 0.0)
    path, chosen = tmp_path / "run.yaml", tmp_path / "chosen.yaml"
    path.write_text(
        "data: {name: ring8}\nstrategy: diloco\nh: 25\nsteps: 1000\nsites: 2\n"
        "model: {width: 4}\nouter: {generator: {lr: 0.3}}\nlink: {rate_mbit: 20, rtt_ms: 50}\n"
    )
    code, out, err = fedwan(capsys, str(path), "strategy=local_sgd", "--yaml", str(chosen))
    assert (code, err) == (0, "")
    assert "as configured: diloco, fp32, H = 25: sites compute" in out
    assert "advice: " in out and "local_sgd" in out
    run = load_run(chosen, [])
    assert (run.strategy, run.model["width"], run.data.name) == ("local_sgd", 4, "ring8")


def test_a_measured_link_takes_the_place_of_a_described_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "link.json"
    path.write_text(json.dumps(asdict(FOUND) | {"advice": None}))
    code, out, _ = fedwan(capsys, *MODEL, *SMALL, "h=50", "--link", str(path))
    assert code == 0 and "payloads get 88.5 Mbit/s up and 39.3 down, 100 ms" in out
    code, _, err = fedwan(capsys, *MODEL, *LINK, "--link", str(path))
    assert code == 2 and "link.rate_mbit has no effect: --link tells" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            (*MODEL, *LINK, "round.quorum=9"),
            "round.quorum = 9 is out of range; choose 0 to sites (4",
        ),
        ((*MODEL, *LINK, "h=20", "stream.tau=25"), "needs stream.tau=19 or less"),
        ((*MODEL, *LINK, "h=20", "stream.fragments=30"), "needs stream.fragments=20 or less"),
        ((*MODEL, *LINK, "h=99", "stream.fragments=60"), "set stream.fragments=40 or less"),
        ((*MODEL, *LINK, "parms=3"), "unknown key 'parms' (= 3); did you mean 'params'?"),
        ((*MODEL, *LINK, "usd=3"), "did you mean 'usd_per_gb'?"),
        ((*MODEL, *LINK, "strategy=dilco"), "did you mean 'diloco'?"),
        ((*MODEL, *LINK, "codec.up=int5"), "codec.up = 'int5' is none of fp32"),
        ((*MODEL, *LINK, "params=0"), "params = 0.0 is out of range; choose 1 or more"),
        ((*MODEL, *LINK, "step_s=nan"), "step_s = nan is out of range"),
        ((*MODEL, *LINK, "seed=3"), "seed has no effect on a plan without a CONFIG.yaml"),
        ((*MODEL,), "link.rate_mbit has no value"),
        ((*LINK, "step_s=0.1"), "params has no value; give params=57.2e6"),
        ((*LINK, "params=1e6"), "step_s has no value"),
        (("nope.yaml",), "config file 'nope.yaml' does not exist"),
        ((*MODEL, "--link", "nope"), "--link = 'nope' is no file here, and no host:port"),
        ((*MODEL, "--link", "host:1"), "add --identity DIR"),
        ((*MODEL, *LINK, "--identity", "x"), "--identity has no effect without --link"),
        ((*MODEL, *LINK, "--json", "no/folder/x"), "--json = 'no/folder/x' cannot be written"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = fedwan(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("fedwan: ") and err.count("\n") == 1 and says in err
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_is_refused_before_the_workload_is_timed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "step_seconds", lambda *_: pytest.fail("it was timed"))
    path = tmp_path / "run.yaml"
    path.write_text("sites: 2\nlink: {rate_mbit: 20}\n")
    code, _, err = fedwan(capsys, str(path), "h=20", "stream.tau=20")
    assert code == 2 and "needs stream.tau=19 or less" in err
    code, _, err = fedwan(capsys, str(path), "params=3")
    assert code == 2 and "params = 3 has no effect" in err


def test_what_a_single_network_does_is_not_planned_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    for setting, what in (("h: 5", "travel together"),):
        path.write_text(f"workload: gan\nnetwork: {{discriminator: {{{setting}}}}}\n")
        code, out, err = fedwan(capsys, str(path), *LINK)
        key = f"network.discriminator.{setting.replace(': ', '=')}"
        assert (code, out) == (2, "") and f"{key} cannot be planned for" in err
        assert f"all networks to {what}; leave it out" in " ".join(err.split())
