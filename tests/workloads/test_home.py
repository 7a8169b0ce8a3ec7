"""Which tensors of trained networks stay at the sites."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fedwan.errors import ConfigError, UserError
from fedwan.optim_state import NamedOptimizers
from fedwan.site.replica import Replica
from fedwan.state import Role, layout_of, state_of
from fedwan.workloads.home import staying_home
from tests.support import SGD, TinyWorkload

FIRST = {"net/first.weight", "net/first.bias"}
NORM = {
    f"net/norm.{n}"
    for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
}


def tiny() -> TinyWorkload:
    return TinyWorkload({"net": SGD, "other": SGD}, norm=True)


def held_by(workload: TinyWorkload) -> set[str]:
    return NamedOptimizers.of(workload.networks, workload.optimizers).held()


def home(workload: TinyWorkload, *patterns: str) -> dict[str, Role]:
    exclude = {"net": patterns} if patterns else {}
    return staying_home(workload.networks, held_by(workload), exclude)


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["norm.*"], NORM),
        (["first.weight", "*.bias"], FIRST | {"net/norm.bias", "net/again.bias"}),
        (["first.[bw]*"], FIRST),
    ],
)
def test_what_patterns_match_is_in_no_layout(patterns: list[str], names: set[str]) -> None:
    workload = tiny()
    found = home(workload, *patterns)
    assert found == dict.fromkeys(names, Role.EXCLUDED)
    layout = layout_of(workload.networks, found)
    assert layout.keys() == state_of(workload.networks, found).keys()
    assert layout.keys() == layout_of(workload.networks).keys() - names


def test_complex_numbers_are_refused_by_name_where_they_would_travel() -> None:
    workload = tiny()
    workload.networks["other"].turn = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    assert "other/turn" in home(workload)  # nobody steps it
    workload.optimizers["other"].add_param_group({"params": workload.networks["other"].turn})
    for call in (lambda: home(workload), lambda: Replica(workload.networks, workload.optimizers)):
        with pytest.raises(UserError, match=r"^tensor 'other/turn' is torch.complex64, which"):
            call()
    Replica(workload.networks, workload.optimizers, exclude={"other": ["turn"]})


def test_parameters_that_need_no_gradient_or_have_no_optimiser_are_frozen() -> None:
    workload = tiny()
    net, other = workload.networks.values()
    net.first.requires_grad_(False)  # type: ignore[operator, union-attr]
    held = [p for name, p in other.named_parameters() if not name.startswith("first")]
    workload.optimizers["other"] = torch.optim.SGD(held, lr=0.1)
    frozen = FIRST | {name.replace("net", "other") for name in FIRST}
    assert home(workload) == dict.fromkeys(frozen, Role.FROZEN)
    # Running statistics of frozen parts move all the same, and are merged.
    net.requires_grad_(False)
    net.again.requires_grad_(True)  # type: ignore[operator, union-attr]
    travelling = {n for n in layout_of(workload.networks, home(workload)) if n.startswith("net/")}
    assert travelling == {"net/again.weight", "net/again.bias"} | {
        n for n in NORM if n.rpartition(".")[2] not in ("weight", "bias")
    }


def by_fused_steps(network: nn.Module) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, fused=True)
    for param in network.parameters():
        param.requires_grad_().grad = torch.ones_like(param)
    optimizer.step()


def by_data(network: nn.Module) -> None:
    for param in network.parameters():
        param.data.mul_(0.9)


@pytest.mark.parametrize("write", [by_data, by_fused_steps])
@pytest.mark.parametrize("key", ["net", "judge"])
def test_a_write_to_frozen_parameters_is_told_however_it_is_made(
    write: Callable[[nn.Module], None], key: str
) -> None:
    net, judge = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net[1].parameters(), lr=0.1)
    replica = Replica({"net": net, "judge": judge}, {"net": optimizer})
    replica.follow()
    write({"net": net, "judge": judge}[key][0])
    with pytest.raises(UserError, match=f"^parameter '{key}/0.bias' was frozen when training"):
        replica.follow()


def refusal(workload: TinyWorkload, *patterns: str) -> str:
    with pytest.raises(ConfigError) as raised:
        staying_home(workload.networks, held_by(workload), {"net": patterns})
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_patterns_that_leave_nothing_or_match_nothing_are_refused() -> None:
    workload = tiny()
    assert "'frist.weight', which matches nothing" in refusal(workload, "*.bias", "frist.weight")
    assert refusal(workload, "frist.weight").endswith("did you mean 'first.weight'?")
    assert "matches all parameters" in refusal(workload, "*")
    assert "matches all parameters" in refusal(workload, "*.weight", "*.bias")
    workload.networks["net"].first.requires_grad_(False)  # type: ignore[operator, union-attr]
    assert "matches nothing of it that would travel" in refusal(workload, "first.*")

    linear = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))  # whose vectors stay anyway
    workload.networks["net"] = nn.Sequential(linear)
    workload.optimizers["net"] = torch.optim.SGD(linear.parameters(), lr=0.1)
    assert "matches nothing" in refusal(workload, "*._u")
    assert home(workload, "*.original") == {"net/0.parametrizations.weight.original": Role.EXCLUDED}
    workload.networks["net"].requires_grad_(False)
    with pytest.raises(ConfigError, match="'net' has an optimiser but no parameter that it could"):
        home(workload)
