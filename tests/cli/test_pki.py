"""`fedwan pki` from the first command to the last."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography import x509

from fedwan.cli.main import main
from fedwan.link.tls import Identity, RevocationList


def fedwan(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    return caught.value.code


def test_init_issue_and_revoke_work_in_the_default_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fedwan("pki", "init", "--host", "coordinator.example.com") == 0
    assert fedwan("pki", "issue", "paris", "--days", "30") == 0
    site = Identity.load(Path("pki/paris"))
    assert site.name == "paris"
    assert fedwan("pki", "revoke", "paris") == 0
    assert RevocationList(Path("pki/coordinator")).is_revoked(
        x509.load_pem_x509_certificate(site.cert_pem).serial_number
    )
    out = capsys.readouterr().out
    assert "pki/coordinator  (valid for 90 days)" in out
    assert "pki/paris  (valid for 30 days)" in out


def test_a_folder_can_be_named_in_every_command(tmp_path: Path) -> None:
    folder = str(tmp_path / "authority")
    assert fedwan("pki", "init", folder, "--host", "a.example", "--host", "192.0.2.1") == 0
    assert fedwan("pki", "issue", "s1", "--pki", folder) == 0
    assert fedwan("pki", "init", folder) == 2
    before = Identity.load(tmp_path / "authority" / "coordinator", "coordinator")
    assert fedwan("pki", "init", folder, "--renew", "--host", "b.example") == 0
    after = Identity.load(tmp_path / "authority" / "coordinator", "coordinator")
    assert after.cert_pem != before.cert_pem and after.ca_pem == before.ca_pem


def test_keys_are_private_under_a_careless_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert fedwan("pki", "init", str(tmp_path / "p")) == 0
    finally:
        os.umask(before)
    Identity.load(tmp_path / "p" / "coordinator", "coordinator")
    assert (tmp_path / "p" / "ca" / "ca.key").stat().st_mode & 0o077 == 0
