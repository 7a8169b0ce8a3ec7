"""What a scheduler of diffusers says of training and sampling: the noise, the target, the weight.

    DDPM and its kin    noise, velocity or image (`prediction_type`) at a random timestep, Ho et al.
                        2020 (2006.11239); samples by DDIM, Song et al. 2021 (2010.02502)
    FlowMatch           the velocity of a rectified flow, see `fedwan.workloads.flow`

With `min_snr` = g the loss of a timestep weighs min(SNR, g) in the error of the image (Hang et al.
2023, 2303.09556, section 3.4).
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fedwan.errors import ConfigError
from fedwan.extras import require
from fedwan.files import absolute_path
from fedwan.names import nearest
from fedwan.rng import NamedGenerators
from fedwan.workloads import flow

TARGETS = ("epsilon", "v_prediction", "sample")
"""What a network of the DDPM family may predict."""


def model_folder(path: str) -> str:
    """`model.path` from the root, if there is any; names of the Hub are no folders."""
    if path and not Path(path).is_dir():
        raise ConfigError(
            f"model.path = {path!r} is no folder on this machine; nothing is downloaded, so name a "
            "folder that holds the model"
        )
    return absolute_path(path)


def read_json(path: Path) -> dict[str, Any]:
    """A file of settings that diffusers wrote; a `ConfigError` if there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); give model.path another folder"
        ) from None
    return found if isinstance(found, dict) else {}


@contextmanager
def reading(folder: Path, what: str) -> Iterator[None]:
    """Weights of a folder of diffusers that are missing or damaged are a `ConfigError`."""
    try:
        yield
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"model.path = {str(folder)!r}: {what} cannot be read ({why}); give a folder "
            "that save_pretrained wrote, with .safetensors files"
        ) from None


def sealed(digest: str) -> nn.Module:
    """A frozen network of a digest in hexadecimal: at Join it is seen to be the same everywhere."""
    seal, values = nn.Module(), list(bytes.fromhex(digest))
    seal.digest = nn.Parameter(torch.tensor(values, dtype=torch.float32), requires_grad=False)
    return seal


class Noised(NamedTuple):
    """What a network is given of a batch, and what it should say."""

    x: Tensor
    """Like the data, (batch, …)."""
    timestep: Tensor
    """(batch,): int64 of the DDPM family, float of flows."""
    target: Tensor
    """Like the data."""
    weight: Tensor | None
    """(batch,); None weighs all alike."""

    def loss(self, predicted: Tensor) -> Tensor:
        """Mean squared error, ()."""
        if self.weight is None:
            return mse_loss(predicted, self.target)
        return (self.weight * (predicted - self.target).square().flatten(1).mean(1)).mean()


class Denoising:
    """One scheduler, of the settings that a folder has or of a class of diffusers."""

    def __init__(self, found: dict[str, Any], default: str, min_snr: float = 0.0) -> None:
        self.scheduler: Any = _scheduler(require("diffusers", "diffusers"), found, default)
        self.is_flow = "prediction_type" not in self.scheduler.config
        self._min_snr = min_snr
        if self.is_flow and min_snr:
            raise ConfigError(
                f"model.min_snr = {min_snr} has no effect on a flow's scheduler; leave it out"
            )

    def digest(self) -> str:
        """Of the scheduler's settings."""
        told = {k: v for k, v in self.scheduler.config.items() if not k.startswith("_")}
        text = json.dumps(told | {"of": type(self.scheduler).__name__}, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def solver(self) -> Any:
        """The class of diffusers that makes samples."""
        return type(self.scheduler) if self.is_flow else require("diffusers", "").DDIMScheduler

    def noised(self, x: Tensor, rng: NamedGenerators, offset: float = 0.0) -> Noised:
        """Data (batch, …) at random noise levels; `offset` as of `model.noise_offset`."""
        device = x.device
        noise = torch.randn(x.shape, generator=rng.on("noise", device), device=device).to(x)
        if offset:
            drawn = torch.randn(x.shape[:2], generator=rng.on("offset", device), device=device)
            noise += offset * drawn.to(x).view(*drawn.shape, *[1] * (x.dim() - 2))
        count, total = len(noise), self.scheduler.config.num_train_timesteps
        if self.is_flow:
            sigma = flow.draw_sigma(count, rng["sigma"], self.scheduler.config.shift)
            sigma = sigma.to(x, non_blocking=True)
            noisy, velocity = flow.interpolate(x, noise, sigma)
            return Noised(noisy, sigma * total, velocity, None)
        step = torch.randint(total, (count,), generator=rng["step"]).to(device, non_blocking=True)
        if self.scheduler.config.prediction_type == "v_prediction":
            target = self.scheduler.get_velocity(x, noise, step)
        else:
            target = noise if self.scheduler.config.prediction_type == "epsilon" else x
        weight = self._weight(step) if self._min_snr else None
        return Noised(self.scheduler.add_noise(x, noise, step), step, target, weight)

    def _weight(self, step: Tensor) -> Tensor:
        """Of each timestep, (batch,), in the error of what is predicted."""
        kept = self.scheduler.alphas_cumprod.to(step.device)[step]
        # Of `rescale_betas_zero_snr` the last is 0.
        snr = (kept / (1 - kept)).clamp(min=torch.finfo(kept.dtype).tiny)
        per = {"epsilon": snr, "v_prediction": snr + 1, "sample": torch.ones_like(snr)}
        weight: Tensor = snr.clamp(max=self._min_snr) / per[self.scheduler.config.prediction_type]
        return weight

    def sample(self, predict: Callable[[Tensor, Tensor], Tensor], x: Tensor, steps: int) -> Tensor:
        """From noise (num, …) to samples like it; `predict` is told (x, timesteps (num,))."""
        solver = self.solver.from_config(self.scheduler.config)  # it counts its steps
        solver.set_timesteps(steps, device=x.device)
        for step in solver.timesteps:
            found = predict(x, step.expand(len(x))).to(x)  # flows' steps end in its precision
            x = solver.step(found, step, x).prev_sample
        return x


def _scheduler(library: Any, found: dict[str, Any], default: str) -> Any:
    """What noise is added by: a flow's scheduler, or DDPM's with the settings of its kin."""
    name = str(found.get("_class_name", default))
    kind: Any = getattr(library, name, None)
    if not (inspect.isclass(kind) and issubclass(kind, library.SchedulerMixin)):
        names = [n for n in dir(library) if n.endswith("Scheduler")]
        is_of_folder = "_class_name" in found or not default
        mend = "put the right _class_name into the folder's scheduler_config.json"
        mend = mend if is_of_folder else "set model.scheduler=DDPMScheduler"
        raise ConfigError(f"scheduler {name!r} is none of diffusers'; {mend}{nearest(name, names)}")
    is_flow, target = name.startswith("FlowMatch"), found.get("prediction_type", "epsilon")
    has_betas = "beta_schedule" in inspect.signature(kind.__init__).parameters
    is_known = not found.get("use_dynamic_shifting") if is_flow else has_betas and target in TARGETS
    if not is_known:
        raise ConfigError(
            f"scheduler {name!r} with prediction_type {target!r} is none that this workload knows; "
            f"it knows {', '.join(TARGETS)}, and FlowMatch schedulers whose use_dynamic_shifting "
            "is false"
        )
    used: Any = kind if is_flow else library.DDPMScheduler
    return used.from_config(found)
