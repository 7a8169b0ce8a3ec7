"""`fedwan pki` from the first command to the last."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography import x509

from fedwan.link.admission import Admission
from fedwan.link.tls import Identity
from tests.cli.conftest import Command, mistake


@pytest.fixture(autouse=True)
def passphrase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDWAN_PKI_PASSPHRASE", "correct horse battery")


def key_shown(text: str) -> str:
    return next(line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("key"))


def test_a_federation_is_made_renewed_and_revoked_in_the_default_folders(
    fedwan: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    careless = os.umask(0)
    code, made, _ = fedwan("pki", "init")
    assert code == 0 and "authority pki/ca: keep it offline" in made
    words = ("pki", "request", "coordinator", "pki/coordinator")
    assert fedwan(*words, "--host", "coordinator.example.com")[0] == 0
    code, signed, _ = fedwan("pki", "sign", "pki/coordinator/identity.csr")
    assert code == 0 and "bring" not in signed  # its key is there
    Identity.load(Path("pki/coordinator"), "coordinator")
    assert "ends on" not in signed and "trusts" not in signed
    assert fedwan("pki", "init", "pki2")[0] == 0
    with Path("pki/coordinator/ca.crt").open("ab") as file:
        file.write(Path("pki2/ca/ca.crt").read_bytes())
    code, renewed, _ = fedwan("pki", "renew", "coordinator", "--days", "1826")
    ends = x509.load_pem_x509_certificate(Path("pki/ca/ca.crt").read_bytes()).not_valid_after_utc
    until = f"{ends:%Y-%m-%d}"
    assert f"pki/coordinator: valid until {until}: the authority ends on {until}\n" in renewed
    assert "trusts  CN=fedwan authority" in renewed
    assert "take it out of pki/coordinator/ca.crt\n" in renewed
    Path("pki/coordinator/identity.key").rename("key")
    assert "bring pki/coordinator/identity.crt into" in fedwan("pki", "renew", "coordinator")[1]
    code, signed, _ = fedwan("pki", "sign", "pki/coordinator/identity.csr")
    folder = "pki/coordinator/"
    assert f"{folder}identity.crt and {folder}ca.crt and {folder}crl.pem into" in signed
    Path("key").rename("pki/coordinator/identity.key")

    code, asked, _ = fedwan("pki", "request", "paris")
    assert code == 0 and "request identity/identity.csr: bring it to the authority" in asked
    code, signed, _ = fedwan("pki", "sign", "identity/identity.csr", "--days", "30")
    until = x509.load_pem_x509_certificate(Path("pki/paris/identity.crt").read_bytes())
    told = f"signed  pki/paris: valid until {until.not_valid_after_utc:%Y-%m-%d}"
    assert code == 0 and told in signed
    assert "bring pki/paris/identity.crt and pki/paris/ca.crt into the site's identity/\n" in signed
    assert key_shown(asked) == key_shown(signed)
    os.umask(careless)
    for path in (*Path("pki/ca").glob("*.key"), Path("identity/identity.key")):
        assert path.stat().st_mode & 0o077 == 0
    for name in ("ca.crt", "identity.crt"):
        Path("identity", name).write_bytes(Path("pki/paris", name).read_bytes())
    site = Identity.load(Path("identity"))
    assert site.name == "paris"
    certificate = x509.load_pem_x509_certificate(site.cert_pem)
    admission = Admission(Path("pki/coordinator"))
    assert fedwan("pki", "renew", "paris")[0] == 0
    assert not admission.objection(certificate)
    assert fedwan("pki", "revoke", "paris")[0] == 0
    assert admission.objection(certificate) == "is revoked"


def test_mistakes_are_one_line(
    fedwan: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "authority")
    assert fedwan("pki", "init", folder)[0] == 0
    mistake(fedwan, "pki", "init", folder)
    sign = ("pki", "sign", "none.csr", "--pki", folder)
    assert "cannot be read" in mistake(fedwan, *sign)
    monkeypatch.delenv("FEDWAN_PKI_PASSPHRASE")
    told = mistake(fedwan, "pki", "init", str(tmp_path / "another"))
    assert "the authority's key gets a passphrase; " in told
    told = mistake(fedwan, *sign)
    assert "the authority's key has a passphrase; " in told
    assert "set FEDWAN_PKI_PASSPHRASE, or call this at a terminal" in told
