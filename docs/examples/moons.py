"""A drift on two half moons: a data set, a network and its loss, for `workload=moons`.

A page of one's own: `sites/moons.py` in the folder that a run is started in, at every site as well.
`fedwan run workload=moons sites=2 steps=500`, or `workload: moons` in a run's file.
"""

import math

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from fedwan.rng import derive_seed, seeded_init
from fedwan.workloads.descent import Simple

USES = ("site.*",)  # precision, accumulation and processes, which `Simple` follows


def moons(num, seed):
    """Points of two half circles, (num, 2), and which of them each is of, (num,)."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.arange(num) % 2
    turn = math.pi * torch.rand(num, generator=rng)
    x = torch.stack([turn.cos() + y - 0.5, turn.sin() * (1 - 2 * y) + y / 2 - 0.25], 1)
    return x + 0.05 * torch.randn(num, 2, generator=rng), y


def dataset(config, site):
    """What a site trains on; each has points of its own."""
    return TensorDataset(*moons(2000, derive_seed(config.seed, "moons", site)))


def build(config, device):
    """The network, from the same weights at every site, with its loss and its samples."""
    with seeded_init(config.seed):
        net = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
    net.to(device)

    def velocity(x, t):
        return net(torch.cat([x, t], 1))

    def loss(batch, rng):  # draws come from `rng["a name"]`: a site that resumes draws the same
        x, _ = batch
        noise = torch.randn(x.shape, generator=rng["noise"]).to(device)
        t = torch.rand(len(x), 1, generator=rng["time"]).to(device)
        return mse_loss(velocity(x + t * (noise - x), t), noise - x)

    def sample(num, seed):
        x = torch.randn(num, 2, generator=torch.Generator().manual_seed(seed)).to(device)
        for step in range(50, 0, -1):
            x = x - velocity(x, torch.full((num, 1), step / 50, device=device)) / 50
        return x

    return Simple(config, "velocity", net, loss, sample)
