"""What noise spends of a budget of differential privacy, and the secret that it is made by.

Both kinds are many steps of one mechanism: a sum that no unit moves by more than the norm in
`privacy.unit`, with normal noise of deviation `noise` times that. It is of single samples'
gradients at a site (`fedwan.workloads.privacy`), or of whole sites' contributions at the
coordinator (`fedwan.coordinator.site_privacy`). The noise is the least with which Opacus's
accountant (Renyi differential privacy, Mironov et al. 2019, 1908.10530) finds all steps within
(epsilon, delta).
"""

from __future__ import annotations

import hashlib
import math
import secrets
import warnings
from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedwan.config import PrivacyConfig
from fedwan.errors import ConfigError
from fedwan.extras import require
from fedwan.state import Layout, Role

EPSILON = "privacy/epsilon"
"""The figure of a contribution that says what was spent by then."""

# Of a few steps, whose epsilon is tiny: true, and no reason to look further.
warnings.filterwarnings("ignore", "Optimal order is the")


class Spending:
    """Noise, and what it has spent; goes into the checkpoint of whoever makes it.

    All draws follow from a secret of the operating system's, which stays with them.
    """

    def __init__(
        self, budget: PrivacyConfig, num_units: int, units: str, rate: float, num_steps: int
    ) -> None:
        """Of `num_units` units, each of which comes into a step with a probability, `rate`."""
        if broken := budget.broken_promise(num_units, units):
            raise ConfigError(broken)
        self.steps = 0
        """That noise was made for."""
        self.budget = budget
        self.secret = secrets.token_bytes(32)
        analysis: Any = require("opacus.accountants.analysis.rdp", "privacy")
        orders = require("opacus.accountants", "privacy").RDPAccountant.DEFAULT_ALPHAS
        try:
            self.noise = _least(budget.epsilon, budget.delta, rate, num_steps)
            """Its deviation in the sum, over the norm that is clipped to."""
        except ValueError:
            raise ConfigError(
                f"privacy.epsilon = {budget.epsilon} at privacy.delta = {budget.delta}: no noise "
                "is enough by the accountant's bounds; set a larger epsilon"
            ) from None
        self._spent = cache(partial(analysis.compute_rdp, q=rate, steps=1, orders=orders))
        self._bound = partial(analysis.get_privacy_spent, orders=orders, delta=budget.delta)

    def taken(self) -> Mapping[int, int]:
        """By the number of times that noise was made for a step, how many steps."""
        return {1: self.steps}

    def epsilon(self) -> float:
        """What was spent in the steps so far, at `privacy.delta`; a bound from above.

        A step that was taken k times, of the same units, is one whose noise is less by √k.
        """
        rdp = sum(
            num_steps * self._spent(noise_multiplier=self.noise / math.sqrt(times))
            for times, num_steps in self.taken().items()
            if num_steps
        )
        return float(self._bound(rdp=rdp)[0]) if np.any(rdp) else 0.0

    def generator(self, *parts: object) -> np.random.Generator:
        """Draws by the secret and by what tells them from others."""
        # Not torch's: on the CPU it has 2^32 seeds, all of which can be tried.
        seed = hashlib.sha256(self.secret + repr(parts).encode()).digest()
        return np.random.default_rng(int.from_bytes(seed))

    def deviation(self, scale: float) -> float:
        """Of the noise on sums that were multiplied by `scale`."""
        return float(self.noise * self.budget.clip * scale)

    def add_noise(self, sums: Iterable[Tensor], scale: float, *parts: object) -> None:
        """A step: noise onto sums that were multiplied by `scale`, in place; `parts` as above."""
        rng, deviation = self.generator("noise", *parts), self.deviation(scale)
        for total in sums:
            noise = rng.standard_normal(tuple(total.shape), dtype=np.float32)
            total.add_(torch.as_tensor(noise).to(total), alpha=deviation)

    def state_dict(self) -> dict[str, Any]:
        """`secret` and `steps`."""
        return {"secret": self.secret.hex(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self.secret, self.steps = bytes.fromhex(state["secret"]), state["steps"]


@cache
def _least(epsilon: float, delta: float, rate: float, num_steps: int) -> float:
    """The noise that so many steps need; a search of half a second."""
    find: Any = require("opacus.accountants.utils", "privacy").get_noise_multiplier
    asked = {"target_epsilon": epsilon, "target_delta": delta, "sample_rate": rate}
    return float(find(**asked, steps=num_steps, accountant="rdp"))


def require_parameters(layout: Layout) -> None:
    """Refuse what no noise is made for where whole sites are private."""
    if odd := [name for name, spec in layout.items() if spec.role is not Role.PARAMETER]:
        raise ConfigError(
            f"{odd[0]} and {len(odd) - 1} other tensors are running statistics or other buffers, "
            "which get no noise; use networks without batch norm, register constants with "
            "persistent=False, or leave privacy.unit=site out"
        )
