"""What a coordinator of a real deployment may not decide."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedwan.cli.main import main
from fedwan.link import pki


def test_whether_sites_show_pictures_of_their_data_is_not_the_coordinator_s_to_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pki.init(tmp_path / "pki", ["127.0.0.1"])
    (tmp_path / "run.yaml").write_text(
        f"workload: pix2pix\nout: {tmp_path / 'out'}\n"
        "data: {name: pairs, split: own, size: 32, show_samples: true}\n"
    )
    identity = str(tmp_path / "pki" / "coordinator")
    with pytest.raises(SystemExit) as caught:
        main(["coordinator", str(tmp_path / "run.yaml"), "--identity", identity])
    errors = capsys.readouterr().err
    assert caught.value.code == 2 and errors.count("\n") == 1
    assert "data.show_samples = True is not the coordinator's to say" in errors
    assert "SITE.yaml" in errors
    assert not (tmp_path / "out").exists()
