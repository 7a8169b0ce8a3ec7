"""`fedwan pki` from the first command to the last."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography import x509

from fedwan.link.tls import Identity, RevocationList
from tests.cli.conftest import Command


def test_init_issue_and_revoke_work_in_the_default_folder(
    fedwan: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, made, _ = fedwan("pki", "init", "--host", "coordinator.example.com")
    assert code == 0 and "pki/coordinator  (valid for 90 days)" in made
    code, issued, _ = fedwan("pki", "issue", "paris", "--days", "30")
    assert code == 0 and "pki/paris  (valid for 30 days)" in issued
    site = Identity.load(Path("pki/paris"))
    assert site.name == "paris"
    assert fedwan("pki", "revoke", "paris")[0] == 0
    assert RevocationList(Path("pki/coordinator")).is_revoked(
        x509.load_pem_x509_certificate(site.cert_pem).serial_number
    )


def test_a_folder_can_be_named_in_every_command(fedwan: Command, tmp_path: Path) -> None:
    folder = str(tmp_path / "authority")
    assert fedwan("pki", "init", folder, "--host", "a.example", "--host", "192.0.2.1")[0] == 0
    assert fedwan("pki", "issue", "s1", "--pki", folder)[0] == 0
    assert fedwan("pki", "init", folder)[0] == 2
    before = Identity.load(tmp_path / "authority" / "coordinator", "coordinator")
    assert fedwan("pki", "init", folder, "--renew", "--host", "b.example")[0] == 0
    after = Identity.load(tmp_path / "authority" / "coordinator", "coordinator")
    assert after.cert_pem != before.cert_pem and after.ca_pem == before.ca_pem


def test_keys_are_private_under_a_careless_umask(fedwan: Command, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert fedwan("pki", "init", str(tmp_path / "p"))[0] == 0
    finally:
        os.umask(before)
    Identity.load(tmp_path / "p" / "coordinator", "coordinator")
    assert (tmp_path / "p" / "ca" / "ca.key").stat().st_mode & 0o077 == 0
