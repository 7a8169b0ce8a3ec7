"""Quality of some weights, measured at a site: figures and samples for the coordinator.

A message has room for 32 MiB: no more samples are made than are shown, and as many are shown as
there is room for.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from fedwan.config import Config
from fedwan.errors import FedwanError, PayloadError, UserError, place_of
from fedwan.link import wire_pb2 as wire
from fedwan.protocol.limits import MOST_FIGURES
from fedwan.rng import derive_seed, lent_generators
from fedwan.site.replica import Replica
from fedwan.site.script import Evaluate, Sample, Script
from fedwan.site.stub import Asked, CoordinatorStub
from fedwan.state import State, add_prefix

log = logging.getLogger(__name__)

NUM_SAMPLES = 64
"""Generated samples in the picture, at most."""
MOST_SHOWN_BYTES = 12 << 20
"""Of generated samples, and of real ones, that are sent."""


class Quality:
    """Measures by a script's `evaluate` and `sample`, or says that there is neither."""

    def __init__(
        self, config: Config, replica: Replica, stub: CoordinatorStub, site: str, script: Script
    ) -> None:
        self._replica, self._stub, self._seed = replica, stub, config.seed
        self._evaluate, self._sample = script.evaluate, script.sample
        # Sites that measure together do so on different samples.
        self._has_own = config.data.split == "own"
        self._draws = derive_seed(config.seed, site) if self._has_own else config.seed
        self._is_none = script.evaluate is None and script.sample is None
        self._num_samples = 0  # in the picture, once the size of one is known

    def answer(self, version: int) -> None:
        """Hand in the quality of the present average; what measures nothing needs no weights."""
        began, weights = time.monotonic(), None
        if not self._is_none:
            weights, header = self._stub.fetch_weights(Asked(kind=Asked.EMA))
            version = header.version
        self.measure(weights, version, began)

    def measure(self, weights: Mapping[str, Tensor] | None, version: int, began: float) -> None:
        """Quality of some weights on held-out data, and samples from them, for the coordinator.

        `began`: when, of `time.monotonic`.
        """
        if self._is_none:
            self._stub.report(wire.QualityReport(version=version, figures_json="{}"))
            return
        gpus = [d for d in (self._replica.device,) if d.type == "cuda"]
        figures, tensors, shown = dict[str, Any](), dict[str, Any](), State()
        with self._replica.showing(weights), torch.no_grad(), lent_generators(gpus):
            if self._evaluate is not None:
                figures, tensors = figures_of(self._evaluate, self._draws)
            if self._sample is not None:
                if not self._num_samples:
                    one = samples_of(self._sample, 1, self._seed)
                    self._num_samples = max(1, _num_shown(one[:1].numel()))
                shown["generated"] = samples_of(self._sample, self._num_samples, self._seed)
        shown = _fitting(shown | {name: tensors[name] for name in tensors.keys() & {"real"}})
        if self._has_own:
            shown |= add_prefix("moments", tensors.get("moments", {}))
        if len(figures) > MOST_FIGURES:
            log.warning("of %d figures the first %d are sent", len(figures), MOST_FIGURES)
            figures = dict(list(figures.items())[:MOST_FIGURES])
        text = json.dumps(figures)
        report = wire.QualityReport(
            version=version,
            figures_json=text,
            samples=safetensors.torch.save(shown),
            evaluation_s=time.monotonic() - began,
        )
        try:
            self._stub.report(report)
        except PayloadError as error:
            log.warning("the coordinator does not take what this site measured: %s", error)
        if figures:
            log.info("quality of version %d in %.2f s: %s", version, time.monotonic() - began, text)


def figures_of(evaluate: Evaluate, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a script's `evaluate` says: figures as numbers, and its `moments` and `real`.

    Raises:
        UserError: it fails, or returns something else.
    """
    found = _called("evaluate", evaluate, seed)
    told = 'evaluate returned a {}; return numbers by name, as {{"loss": float(loss)}}'
    if not isinstance(found, Mapping):
        raise UserError(told.format(type(found).__name__))
    # A script may have figures of these names.
    tensors = {
        name: value
        for name, value in found.items()
        if (name == "moments" and isinstance(value, Mapping))
        or (name == "real" and isinstance(value, Tensor) and value.dim() > 1)
    }
    figures = {}
    for name, value in found.items():
        if name in tensors:
            continue
        try:
            # Tensors of one value, and NumPy's, as numbers; none is one that is not finite.
            number = math.nan if value is None else value
            figures[name] = number.item() if hasattr(number, "item") else number
            if isinstance(figures[name], str):
                raise TypeError
            json.dumps(figures[name])
        except (TypeError, ValueError, RuntimeError):
            raise UserError(told.format(f"{type(value).__name__} as {name!r}")) from None
    return figures, tensors


def samples_of(sample: Sample, num: int, seed: int) -> Tensor:
    """What a script's `sample` makes; a `UserError` if it fails, or makes nothing to be drawn."""
    made = _called("sample", sample, num, seed)
    shape = tuple(getattr(made, "shape", ()))
    are_images = len(shape) == 4 and shape[1] in (1, 3)
    if not isinstance(made, Tensor) or not (are_images or shape[1:] == (2,)) or not made.numel():
        raise UserError(
            f"sample({num}, {seed}) returned a {type(made).__name__} of shape {shape}; return one "
            "tensor of pictures (num, 1 or 3, height, width), or of points (num, 2)"
        )
    if len(made) < num:
        log.warning("sample(%d, %d) returned %d samples; no more are shown", num, seed, len(made))
    return made


def _called(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """What a script's function returns; what it fails with is told by its name.

    Disks may be back at the next try; what else fails would fail again.
    """
    try:
        return function(*args)
    except (FedwanError, OSError):
        raise
    except Exception as error:
        log.exception("%s failed", name)
        text = f"{name} failed: {type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(f"{text}{place_of(error)}; its traceback is in the log") from error


def _num_shown(num_values: int) -> int:
    """How many samples of so many numbers there is room for in a picture."""
    return min(NUM_SAMPLES, MOST_SHOWN_BYTES // (2 * max(1, num_values)))


def _fitting(shown: State) -> State:
    """Samples, (num, …), on the CPU: as many of all as there is room for.

    Pictures, in [-1, 1], become bytes as `draw_samples` shows them; others are fp16 if it helps.
    """
    shown = {name: value for name, value in shown.items() if len(value)}
    most = max((value[:1].numel() for value in shown.values()), default=0)
    num = min((_num_shown(most), *map(len, shown.values())))
    if shown and not num:
        log.warning("samples of %d numbers each are too large to be sent and shown", most)
        return {}
    dtype = torch.float32 if num * most * 4 <= MOST_SHOWN_BYTES else torch.float16
    cut = {name: value[:num] for name, value in shown.items()}
    return {
        name: to_bytes(value) if value.dim() == 4 else value.to("cpu", dtype).contiguous()
        for name, value in cut.items()
    }


def to_bytes(images: Tensor) -> Tensor:
    """Pictures in [-1, 1] as uint8; what is not a number is black."""
    values = images.detach().float().nan_to_num(-1.0).clamp(-1.0, 1.0)
    return ((values * 0.5 + 0.5) * 255).to("cpu", torch.uint8).contiguous()
