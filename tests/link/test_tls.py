"""Identities against real certificates, real sockets and a real gRPC server."""

from __future__ import annotations

import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedwan.errors import IdentityError
from fedwan.link import admission as admission_module
from fedwan.link import certificates, pki, tls
from fedwan.link.admission import Admission, Lapse
from fedwan.link.tls import USAGE, Identity, now
from tests.planes import Bench, dialling, serving


@pytest.fixture
def folders(authority: pki.Authority) -> Path:
    return authority.directory


def test_a_folder_with_the_wrong_files_is_refused_with_the_mend(
    folders: Path, foreign_identities: Path
) -> None:
    for folder, role, says in [
        ("s1", "coordinator", "a site's certificate; give the folder of a coord"),
        ("coordinator", "site", "a coordinator's certificate; give the folder of a s"),
    ]:
        with pytest.raises(IdentityError, match=says):
            Identity.load(folders / folder, role)  # type: ignore[arg-type]
    (folders / "s2" / "identity.key").write_bytes((folders / "s1" / "identity.key").read_bytes())
    with pytest.raises(IdentityError, match="does not belong"):
        Identity.load(folders / "s2")
    (folders / "s1" / "ca.crt").write_bytes((foreign_identities / "s1" / "ca.crt").read_bytes())
    with pytest.raises(IdentityError, match="foreign authority"):
        Identity.load(folders / "s1")
    (folders / "s1" / "identity.key").chmod(0o640)
    with pytest.raises(IdentityError, match="mode 0640, readable by others; run: chmod 600"):
        Identity.load(folders / "s1")


@pytest.mark.parametrize("name", ["ca.crt", "identity.crt", "identity.key"])
def test_a_missing_or_damaged_file_is_named(folders: Path, name: str) -> None:
    path = folders / "s1" / name
    path.write_text("-----BEGIN NONSENSE-----\n")
    with pytest.raises(IdentityError, match=f"{name} cannot be read as PEM"):
        Identity.load(folders / "s1")
    path.unlink()
    with pytest.raises(IdentityError, match=f"{name} is missing"):
        Identity.load(folders / "s1")


@pytest.mark.parametrize(("days", "says"), [(-9999, "expired on"), (1, "not valid before")])
def test_a_certificate_of_another_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int, says: str
) -> None:
    monkeypatch.setattr(certificates, "now", lambda: now() + timedelta(days=days))
    pki.federation(tmp_path, [], ["s1"])
    with pytest.raises(IdentityError, match=says):
        Identity.load(tmp_path / "s1")


def certificate_of(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / "identity.crt").read_bytes())


def test_a_coordinator_s_list_is_read_anew_and_one_that_breaks_keeps_the_revoked_out(
    authority: pki.Authority, foreign_identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = authority.directory / "coordinator"
    admission = Admission(folder)
    first, second = (certificate_of(authority.directory / name) for name in ("s1", "s2"))
    assert not admission.objection(first)
    authority.revoke("s1")
    assert admission.objection(first) == "is revoked" and not admission.objection(second)
    (folder / "crl.pem").write_text("half a fi")
    assert admission.objection(first) == "is revoked" and not admission.objection(second)
    (folder / "crl.pem").unlink()
    assert admission.objection(first) == "is revoked" and not admission.objection(second)
    stranger = certificate_of(foreign_identities / "s1")
    assert "without a revocation list" in admission.objection(stranger)
    whole = (authority.directory / "ca" / "crl.pem").read_bytes()
    (folder / "crl.pem").write_bytes(whole)
    assert admission.objection(first) == "is revoked" and not admission.objection(second)
    monkeypatch.setattr(admission_module, "now", lambda: now() + timedelta(days=4000))
    assert admission.objection(second).startswith("expired on")


def test_without_a_list_of_its_own_authority_a_coordinator_serves_nobody(
    folders: Path, foreign_identities: Path
) -> None:
    path = folders / "coordinator" / "crl.pem"
    path.write_bytes((foreign_identities / "coordinator" / "crl.pem").read_bytes())
    with pytest.raises(IdentityError, match="was not signed by"):
        Admission(path.parent)
    path.unlink()
    with pytest.raises(IdentityError, match="crl.pem is missing"):
        Admission(path.parent)


def openssl(*words: str, folder: Path) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


LIST = ("ca", "-config", "ca.conf", "-gencrl", "-out", "coordinator/crl.pem")


def company(folder: Path) -> Path:
    """A company's root, an authority below it, and what both ends need of it, by openssl alone."""
    (folder / "index.txt").touch()
    (folder / "ca.conf").write_text(
        "[req]\ndistinguished_name=req\n[ca]\ndefault_ca=x\n[x]\ndatabase=index.txt\n"
        "default_md=sha256\ncertificate=issuing.crt\nprivate_key=issuing.key\ndefault_crl_days=30\n"
    )
    is_ca = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign")
    both = "extendedKeyUsage=clientAuth,serverAuth"
    for name, issuer, extensions in (
        ("root", "", is_ca),
        ("issuing", "root", is_ca),
        ("s1", "issuing", (both, "subjectAltName=DNS:s1")),
        ("coordinator", "issuing", (both, "subjectAltName=DNS:localhost,IP:127.0.0.1")),
    ):
        words = ["-subj", f"/O=Example/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.crt"]
        words += [word for each in extensions for word in ("-addext", each)]
        words += ["-CA", f"{issuer}.crt", "-CAkey", f"{issuer}.key"] if issuer else []
        new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30")
        openssl("req", "-x509", "-config", "ca.conf", *new, *words, folder=folder)
    for name in ("s1", "coordinator"):
        (folder / name).mkdir()
        (folder / f"{name}.key").rename(folder / name / "identity.key")
        (folder / name / "identity.key").chmod(0o600)
    openssl(*LIST, folder=folder)
    leaf, issuing, root = ((folder / f"{n}.crt").read_text() for n in ("s1", "issuing", "root"))
    (folder / "s1" / "identity.crt").write_text(leaf + issuing)
    (folder / "s1" / "ca.crt").write_text(root)
    leaf = (folder / "coordinator.crt").read_text()
    (folder / "coordinator" / "identity.crt").write_text(leaf + issuing)
    (folder / "coordinator" / "ca.crt").write_text(root + issuing)
    return folder


def test_a_company_s_authority_serves_with_certificates_between_it_and_its_root(
    tmp_path: Path, foreign_identities: Path
) -> None:
    folder = company(tmp_path)
    site = Identity.load(folder / "s1")
    assert site.name == "s1"
    bench = Bench(tmp_path / "run")
    with serving(bench.hub, folder) as plane, dialling(plane.port, folder / "s1") as link:
        assert not link.join(bench.hello("s1")).refusal
    admission = Admission(folder / "coordinator")
    assert not admission.objection(certificate_of(folder / "s1"))
    openssl("ca", "-config", "ca.conf", "-revoke", "s1.crt", folder=folder)
    openssl(*LIST, folder=folder)
    assert admission.objection(certificate_of(folder / "s1")) == "is revoked"
    (folder / "s1" / "ca.crt").write_bytes((foreign_identities / "s1" / "ca.crt").read_bytes())
    with pytest.raises(IdentityError, match="foreign authority"):
        Identity.load(folder / "s1")


@pytest.mark.parametrize("thief", ["coordinator", "s1"])
def test_who_is_no_authority_vouches_for_nobody(thief: str, folders: Path) -> None:
    """Its certificate behind one that it has signed makes it no intermediate."""
    pem = (folders / thief / "identity.crt").read_bytes()
    own = x509.load_pem_x509_certificate(pem)
    key = serialization.load_pem_private_key((folders / thief / "identity.key").read_bytes(), None)
    forger = certificates.new_key()
    forged = (
        x509.CertificateBuilder(own.subject, certificates.name_of("s2"), forger.public_key(), 7)
        .not_valid_before(now() - timedelta(1))
        .not_valid_after(now() + timedelta(1))
        .add_extension(x509.ExtendedKeyUsage([USAGE["site"]]), critical=False)
        .sign(key, hashes.SHA256())
    )
    chain = forged.public_bytes(serialization.Encoding.PEM) + pem
    signature = forger.sign(b"keys", ec.ECDSA(hashes.SHA256()))
    with pytest.raises(IdentityError, match="of no authority that is trusted here"):
        Identity.load(folders / "s1").verify("s2", chain, signature, b"keys")


def test_a_site_vouches_for_itself_alone_and_until_its_certificate_expires(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = Identity.load(folders / "s1"), Identity.load(folders / "s2")
    signature = other.sign(b"keys")
    mine.verify("s2", other.cert_pem, signature, b"keys")
    with pytest.raises(IdentityError, match="the certificate of s3 is s2's"):
        mine.verify("s3", other.cert_pem, signature, b"keys")
    monkeypatch.setattr(tls, "now", lambda: now() + timedelta(days=4000))
    with pytest.raises(IdentityError, match="the certificate of s2 expired on"):
        mine.verify("s2", other.cert_pem, signature, b"keys")


def test_a_list_that_stays_away_is_missed_from_the_first_time_on(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission, certificate = Admission(folders / "coordinator"), certificate_of(folders / "s1")
    (folders / "coordinator" / "crl.pem").unlink()
    clock = [1000.0]
    monkeypatch.setattr(admission_module.time, "monotonic", lambda: clock[0])
    found = []
    for _ in range(4):  # calls come all the time
        found.append(admission.objection(certificate))
        clock[0] += admission_module.GONE_S / 2.5
    assert not any(found[:3]) and isinstance(found[3], Lapse) and "list is gone" in found[3]


def test_of_two_lists_of_an_authority_either_revokes(authority: pki.Authority) -> None:
    first, second = (certificate_of(authority.directory / name) for name in ("s1", "s2"))
    path = authority.directory / "coordinator" / "crl.pem"
    before = path.read_bytes()
    authority.revoke("s1")
    after = path.read_bytes()
    for lists in (before + after, after + before):
        path.write_bytes(lists)
        admission = Admission(path.parent)
        assert admission.objection(first) == "is revoked" and not admission.objection(second)


def test_who_was_revoked_stays_so_though_an_older_list_is_brought_or_a_copy_s(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two copies of an authority each revokes a site, the later one twice."""
    authority = pki.federation(tmp_path, ["127.0.0.1"], ["s1", "s2", "s3"])
    folder = tmp_path / "coordinator"
    path, sites = folder / "crl.pem", [certificate_of(tmp_path / f"s{n}") for n in (1, 2, 3)]
    lists = [path.read_bytes()]
    for names in (["s1"], ["s2"], ["s2", "s3"]):
        for file in ("ca", "coordinator"):
            (tmp_path / file / "crl.pem").write_bytes(lists[0])
        for name in names:
            authority.revoke(name)
        lists.append(path.read_bytes())
    path.write_bytes(lists[0])
    admission, revoked = Admission(folder), []
    assert not caplog.text
    for n, lines in [(1, 0), (0, 1), (2, 2), (3, 3), (0, 4)]:
        path.unlink()
        path.write_bytes(lists[n])
        revoked.append([bool(admission.objection(site)) for site in sites])
        assert len(caplog.messages) == lines, "one at each list that lacks some"
    one, two, all_three = [True, False, False], [True, True, False], [True] * 3
    assert revoked == [one, one, two, all_three, all_three]
    says = f"{path} no longer has 1 of the revoked certificates of CN=fedwan authority"
    assert caplog.messages[0].startswith(says)
    assert f"(serial {sites[0].serial_number:x})" in caplog.messages[0]
