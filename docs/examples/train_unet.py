"""A diffusers UNet on coloured discs: plain PyTorch, and six lines of fedwan."""

import os

import diffusers
import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import fedwan


class Discs(Dataset):
    """Discs of random place, size and colour, (3, 16, 16) in [-1, 1]."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        x, y, radius = (torch.rand(3, generator=draw) * 8 + 4) * torch.tensor([1, 1, 0.4])
        grid = torch.arange(16.0)
        inside = (grid[:, None] - y) ** 2 + (grid[None] - x) ** 2 < radius**2
        return torch.where(inside, torch.rand(3, 1, 1, generator=draw) * 2 - 1, torch.ones(()))


def main():
    rank = int(os.environ.get("RANK", -1))  # of torchrun
    if rank >= 0:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(16, 3, 3, block_out_channels=(16, 32), norm_num_groups=8,
                                 layers_per_block=1, down_block_types=("DownBlock2D",) * 2,
                                 up_block_types=("UpBlock2D",) * 2)
    model = DistributedDataParallel(unet) if rank >= 0 else unet
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    noises = diffusers.DDPMScheduler(1000)
    torch.manual_seed(rank)
    order = torch.Generator()
    draws = RandomSampler(Discs(), replacement=True, num_samples=10**9, generator=order)
    loader = StatefulDataLoader(Discs(), 16, sampler=draws, generator=order)
    with fedwan.join(networks={"unet": model}, optimizers={"unet": optimizer},
                     state={"loader": loader}, steps=40) as site:
        order.manual_seed(torch.initial_seed())  # of this rank, and by `join` of this site
        for step, images in zip(site, loader):
            noise, level = torch.randn_like(images), torch.randint(1000, (len(images),))
            loss = mse_loss(model(noises.add_noise(images, noise, level), level).sample, noise)
            loss.backward()
            site.reduce()
            optimizer.step()
            optimizer.zero_grad()
            site.log(loss=loss)


if __name__ == "__main__":
    main()
