"""`fedwan plan` from outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedwan.app import load_run
from tests.cli.conftest import Command, mistake
from tests.cli.test_main import LINK, MODEL
from tests.planner.test_costs import FOUND, asdict

SMALL = ("strategy=streaming_diloco", "codec.up=int4", "codec.down=int4")


def test_a_table_and_a_recommendation(fedwan: Command) -> None:
    words = ("sites=4", *LINK, "h=50", "codec.up=int4", "usd_per_gb=0.05", "--all")
    code, out, err = fedwan("plan", *MODEL, *words)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("57,182,660 values, steps of 0.1 s, 4 sites; payloads get 88.4 Mbit")
    assert lines[2].split()[:4] == ["strategy", "codec", "H", "fragments"]
    assert lines[2].endswith("cost") and "$" in lines[3]
    assert lines[-3].startswith("advice: take streaming_diloco, int4, H = 50, 10 fragments")
    # 4 sites, 997 kB a step of 0.1 s both ways, 99.3 % of the time
    assert lines[-2] == "coordinator's line: 158 Mbit/s in and 158 out on average, of 4 sites"
    for name in ("local_sgd", "diloco", "streaming_diloco", "eager_diloco"):
        assert any(name in line for line in lines[3:-3])


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


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("codec.up=masked4", "codec.up = 'masked4' is not planned"),
        ("network.generator.h=5", "network.generator is not counted by a plan; leave it out"),
    ],
)
def test_what_a_plan_cannot_count_is_refused(fedwan: Command, word: str, says: str) -> None:
    assert says in mistake(fedwan, "plan", *MODEL, *LINK, word)


def test_a_measured_link_takes_the_place_of_a_described_one(
    fedwan: Command, tmp_path: Path
) -> None:
    path = tmp_path / "link.json"
    path.write_text(json.dumps(asdict(FOUND)))
    code, out, _ = fedwan("plan", *MODEL, *SMALL, "h=50", "--link", str(path))
    assert code == 0 and "payloads get 88.5 Mbit/s up and 39.3 down, 100 ms" in out
    told = mistake(fedwan, "plan", *MODEL, LINK[0], "--link", str(path))
    assert "link.rate_mbit has no effect: --link tells" in told
