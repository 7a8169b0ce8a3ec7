"""`init.NETWORK=path`: training starts from a plain file, or says why it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from fedwan.app import load_run
from fedwan.errors import ConfigError
from fedwan.weights import load_initial
from tests.trained_runs import POINTS


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), spectral_norm(nn.Linear(3, 2)))


def saved(path: Path, module: nn.Module, without: str = "-") -> dict[str, str]:
    state = {n: v.contiguous() for n, v in module.state_dict().items() if without not in n}
    save_file(state, path)
    return {"net": str(path)}


def test_a_network_takes_the_weights_of_a_file_in_its_own_dtype(tmp_path: Path) -> None:
    init = saved(tmp_path / "net.safetensors", network())
    target = network().bfloat16()
    weight = target[0].weight
    load_initial({"net": target}, init)
    assert target[0].weight is weight and weight.dtype is torch.bfloat16
    other = network()
    load_initial({"net": other}, init)
    assert torch.equal(weight, other[0].weight.bfloat16())


def test_vectors_of_spectral_norm_and_frozen_and_excluded_tensors_may_be_missing(
    tmp_path: Path,
) -> None:
    load_initial({"net": network()}, saved(tmp_path / "a.safetensors", network(), "._"))
    init = saved(tmp_path / "b.safetensors", network(), "0.weight")
    with pytest.raises(ConfigError, match="lacks '0.weight', which is trained"):
        load_initial({"net": network()}, init)
    load_initial({"net": network()}, init, {"net": ["0.*"]})
    frozen = network()
    frozen[0].requires_grad_(False)
    load_initial({"net": frozen}, init)


def refusal(networks: dict[str, nn.Module], init: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_initial(networks, init)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_does_not_fit_is_one_line_and_changes_nothing(tmp_path: Path) -> None:
    init = saved(tmp_path / "net.safetensors", network())
    line = refusal({"nets": network()}, init)
    assert line == "init.net: networks are nets; did you mean 'nets'?"
    assert "is no file on this machine" in refusal({"net": network()}, {"net": "nowhere"})
    (tmp_path / "text").write_text("no tensors")
    assert "is no safetensors file" in refusal({"net": network()}, {"net": str(tmp_path / "text")})
    other = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(4))
    before = other[0].weight.clone()
    assert "'1.bias' is of shape (3,), and the module's of (4,)" in refusal({"net": other}, init)
    del other[1]
    assert "holds '1.bias', which the module has not" in refusal({"net": other}, init)
    assert torch.equal(before, other[0].weight)


def test_a_run_is_refused_before_it_starts_where_a_file_does_not_fit(tmp_path: Path) -> None:
    init = saved(tmp_path / "net.safetensors", network())
    for word, says in (
        (f"init.generator={init['net']}", "which the module has not"),
        ("init.genrator=x", "did you mean 'generator'?"),
        ("init.generator=[1]", "init.generator = "),
        ("init=x", "is a section, not a setting"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_run(None, [*POINTS, word])
        assert says in str(caught.value), str(caught.value)


def test_paths_are_absolute_in_what_a_run_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedwan.app import load_workload

    config = load_run(None, POINTS)
    generator = load_workload("gan").build(config, "cpu").networks["generator"]
    saved(tmp_path / "g.safetensors", generator)
    monkeypatch.chdir(tmp_path)
    config = load_run(None, [*POINTS, "init.generator=g.safetensors"])
    assert config.init == {"generator": str(tmp_path / "g.safetensors")}
