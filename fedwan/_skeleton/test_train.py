"""The script trains, alone and without any service: python -m pytest."""

from train import train


def test_the_loss_falls() -> None:
    """In 300 steps by a fifth."""
    losses = train(steps=300)
    assert len(losses) == 300
    assert sum(losses[-50:]) < 0.8 * sum(losses[:50])
