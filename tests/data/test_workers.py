"""Workers of loaders, which import what they fetch from anew: pages and scripts of one's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

pytestmark = pytest.mark.slow

DATA = """
    import torch
    from torch.utils.data import Dataset

    class Numbers(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, place):
            return torch.full((2,), float(place))
"""


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(dedent(text))
    command = [sys.executable, "script.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_they_find_a_recipe_s_page_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    page = "\nUSES = ()\nbuild = None\n\ndef dataset(config, site):\n    return Numbers()\n"
    (tmp_path / "sites" / "own.py").write_text(dedent(DATA) + page)
    ran = run_script(
        tmp_path,
        """
        import torch
        from fedwan.app import load_workload
        from fedwan.config import Config, DataConfig
        from fedwan.data import dataset_of

        if __name__ == "__main__":
            config = Config("own", data=DataConfig(batch=4, workers=1))
            loader = dataset_of(load_workload("own"), config, "s1").loader(4, torch.Generator())
            print(*next(loader).shape)
            loader.close()
        """,
    )
    assert ran.stdout == "4 2\n", ran.stderr


def test_they_do_not_join_the_run_of_a_script_that_does_all_at_its_import(tmp_path: Path) -> None:
    script = dedent(DATA) + dedent(
        """
        import fedwan
        from fedwan.data import Loader

        net = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        loader = Loader(Numbers(), 8, workers=1)
        with fedwan.join(networks={"net": net}, optimizers={"net": optimizer}, steps=3) as site:
            for step, batch in zip(site, loader):
                net(batch).sum().backward()
        """
    )
    ran = run_script(tmp_path, script)
    assert ran.returncode != 0
    assert 'would join as well; put what it does under `if __name__ == "__main__":`' in ran.stderr
