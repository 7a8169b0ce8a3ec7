"""A site's script, `train.py OUT`: says that it joined, and waits for a file OUT/finish."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import fedwan

out = Path(sys.argv[1])
torch.manual_seed(0)
network = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
with fedwan.join(networks={"net": network}, optimizers={"net": optimizer}, steps=8) as site:
    with (out / "joined.jsonl").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "step": site.step}) + "\n")
    for step in site:
        while step == 2 and not (out / "finish").exists():
            time.sleep(0.05)
        optimizer.zero_grad()
        network(torch.ones(1, 2)).square().sum().backward()
        optimizer.step()
