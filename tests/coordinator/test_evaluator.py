"""Who measures, and what is made of it."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import safetensors.torch
import torch
from torch import Tensor

from fedwan.config import Config, EvalConfig
from fedwan.coordinator.evaluator import Evaluated, Evaluator, find, seen_through
from fedwan.coordinator.records import Totals
from fedwan.metrics.distances import compare, merge_comparisons, pack_comparisons
from fedwan.protocol.evaluation import Evaluation
from fedwan.protocol.limits import Report
from fedwan.state import State, add_prefix


def parts(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    real, made, other = (torch.randn(30, 4, generator=generator) + seed for _ in range(3))
    return real, made, other


def report(version: int, fd: float = 1.0, moments: State | None = None, **others: object) -> Report:
    shown = {"generated": torch.full((1, 2), fd)} | add_prefix("moments", moments or {})
    figures = {"fd": fd, "fd_floor": 0.5, **others}
    return Report(version, figures, safetensors.torch.save(shown))


def own(version: int, seed: int, fd: float = 1.0, **others: object) -> Report:
    return report(version, fd, pack_comparisons([compare(*parts(seed))]), **others)


def findings(evaluation: Evaluation, live: list[str]) -> list[Evaluated]:
    return [find(reports) for reports in evaluation.found(live)]


def test_of_own_data_all_are_asked_and_their_data_measured_together() -> None:
    evaluation = Evaluation(asks_all=True)
    live = ["s1", "s2", "s3"]
    assert evaluation.choose(live, ["s2"]) == live
    others = {"kid": 0.2, "histogram": [1.0, 0.0], "two": [1.0], "num_real": 20}
    evaluation.hear("s2", own(4, 2, 2.0, **others)._replace(evaluation_s=5.0))
    dark = safetensors.torch.save(add_prefix("moments", pack_comparisons([compare(*parts(1))])))
    evaluation.hear(
        "s1",
        own(4, 1, kid=0.1, histogram=[0.5, 0.5], two=[1, 2], num_real=19)._replace(samples=dark),
    )
    assert findings(evaluation, live) == []
    assert evaluation.choose(live, []) == []
    evaluation.hear(
        "s3", own(4, 3, kid=0.6, histogram=[0, 1.0], two=3.0, precision=1.0, num_real=31)
    )
    (finding,) = findings(evaluation, live)
    assert (finding.sites, finding.version, finding.complaint) == (("s1", "s2", "s3"), 4, "")
    expected = merge_comparisons([[compare(*parts(seed))] for seed in (1, 2, 3)])
    histogram = finding.figures.pop("histogram")
    expected |= {"kid": 0.3, "num_real": 70}
    assert histogram == [0.5, 0.5] and finding.figures == pytest.approx(expected)
    assert finding.evaluation_s == 5.0, "the longest"
    assert float(safetensors.torch.load(finding.samples)["generated"][0, 0]) == 2.0
    assert evaluation.is_idle(live)
    assert evaluation.choose(live, []) == live
    evaluation.hear("s1", own(4, 1))
    (finding,) = findings(evaluation, ["s1"])
    assert finding.sites == ("s1",), "the dead are not waited for"


SCALARS = {f"moments:{name}": torch.ones(()) for name in ("counts", "means", "covariances")}


@pytest.mark.parametrize("samples", [b"", None, safetensors.torch.save(SCALARS)])
def test_without_moments_the_mean_is_taken_and_said_to_be_one(samples: bytes | None) -> None:
    evaluation = Evaluation(asks_all=True)
    evaluation.choose(["s1", "s2"], [])
    bad = report(4, 3.0)
    if samples is not None:
        bad = bad._replace(samples=samples)
    evaluation.hear("s1", own(4, 1, 1.0))
    evaluation.hear("s2", bad)
    (finding,) = findings(evaluation, ["s1", "s2"])
    assert finding.figures == {"fd": 2.0, "fd_floor": 0.5}
    assert "fd is the mean over sites" in finding.complaint


def test_of_two_that_measure_a_version_the_worse_one_is_kept_and_of_versions_the_newer() -> None:
    hub, totals, rows = Mock(), Totals(), list[dict[str, Any]]()
    evaluator = Evaluator(Config(), hub, totals, rows.append, Mock())
    for version, site, fd in ((2, "s1", 1.0), (2, "s2", 0.5), (2, "s3", 3.0), (1, "s1", 9.0)):
        evaluator._keep(Evaluated((site,), version, {"fd": fd}, b"", 1.0))
    assert (totals.quality["fd"], totals.quality_version) == (3.0, 2)
    assert [row["fd"] for row in rows] == [1.0, 3.0, 9.0]


@pytest.mark.parametrize("is_own", [True, False])
def test_of_own_data_nobody_is_asked_at_a_resumed_run_s_end_before_its_quorum_is_here(
    is_own: bool,
) -> None:
    hub = Mock()
    hub.changed, hub.evaluation = MagicMock(), Evaluation(asks_all=is_own)
    hub.live.return_value, hub.rounds.quorum, hub.rounds.latest = ["s1"], 2, []
    hub.registry.sites = {"s1": Mock(session="a"), "s2": Mock(session="")}
    evaluator = Evaluator(Config(), hub, Totals(), Mock(), Mock())
    assert evaluator.wants(4) and hub.registry.tell.called is not is_own
    hub.live.return_value, hub.registry.sites["s2"].session = ["s1", "s2"], "b"
    assert evaluator.wants(4)
    assert [call.args[0] for call in hub.registry.tell.call_args_list] == ["s1", "s2"][: 1 + is_own]


def test_who_measures_what_is_told_with_the_step() -> None:
    hub = Mock()
    evaluator = Evaluator(Config(), hub, Mock(), Mock(), Mock())
    evaluator.note(10, 200)
    evaluator.begin("s1", 10)
    hub.event.assert_called_once_with("measuring", "s1", "s1 measures version 10 (step 200)")


IMAGES = {"fd": 1.0, "num_real": 9}


@pytest.mark.parametrize(
    ("figures", "config", "expected"),
    [
        (IMAGES, Config(), "random features"),  # a recipe's own data set, whatever data.name is
        (IMAGES | {"histogram": [1.0]}, Config(), "own classifier"),
        (IMAGES, Config(eval=EvalConfig(features="/models/clip.pt")), "clip.pt"),
        (IMAGES, Config(eval=EvalConfig(features="own.seen:means")), "own.seen:means"),
        (IMAGES | {"histogram": [1.0], "modes": 8}, Config(), ""),
        ({"fd": 1.0}, Config(), ""),
        (IMAGES, Config(workload="command"), ""),
    ],
)
def test_what_images_were_seen_through_follows_from_figures_and_settings(
    figures: dict[str, object], config: Config, expected: str
) -> None:
    assert seen_through(config, figures) == expected
