"""Train a small flow on two half moons: put your own network, data and loss in their place.

python train.py                                    alone, on this machine
fedwan launch --sites 2 -- python train.py         two sites and a coordinator, on this machine
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fedwan

STEPS, BATCH = 2000, 256


def half_moons(num: int) -> Tensor:
    """Points (num, 2). At a real site: the data that lie there, whatever their kind."""
    angle = torch.pi * torch.rand(num)
    upper = torch.stack([angle.cos(), angle.sin()], dim=1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], dim=1)
    points = torch.where(torch.rand(num, 1) < 0.5, upper, lower)
    return points + 0.05 * torch.randn(num, 2)


def velocity_loss(velocity: nn.Module, points: Tensor) -> Tensor:
    """Rectified flow: the velocity from noise to data, anywhere on the straight way."""
    noise, time = torch.randn_like(points), torch.rand(len(points), 1)
    place = torch.lerp(noise, points, time)
    guess = velocity(torch.cat([place, time], dim=1))
    return nn.functional.mse_loss(guess, points - noise)


@torch.no_grad()
def sample(velocity: nn.Module, num: int, seed: int, num_steps: int = 32) -> Tensor:
    """Samples (num, 2): from noise along the velocity, in Euler steps."""
    x = torch.randn(num, 2, generator=torch.Generator().manual_seed(seed))
    for step in range(num_steps):
        time = torch.full((num, 1), step / num_steps)
        x = x + velocity(torch.cat([x, time], dim=1)) / num_steps
    return x


def train(steps: int = STEPS) -> list[float]:
    """Train to the end; losses by step."""
    torch.manual_seed(0)  # the same initial weights at every site
    velocity = nn.Sequential(
        *(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
    )
    optimizer = torch.optim.AdamW(velocity.parameters(), lr=2e-3)
    points = half_moons(4096)
    losses: list[Tensor] = []
    with fedwan.join(
        networks={"velocity": velocity},
        optimizers={"velocity": optimizer},
        sample=lambda num, seed: sample(velocity, num, seed),
        steps=steps,
    ) as site:
        for _ in site:
            loss = velocity_loss(velocity, points[torch.randint(len(points), (BATCH,))])
            optimizer.zero_grad()
            loss.backward()
            site.reduce()
            optimizer.step()
            site.log(loss=loss)
            losses.append(loss.detach())
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    train()
