"""The local certificate authority: strict verifiers accept what it signs; it is made once and renewed in time."""

import ipaddress
import os
import socket
import ssl
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from twinbus.namespace.front import certificates
from twinbus.namespace.front.certificates import (
    CA_KEY_FILE,
    SERVER_FILE,
    SERVER_KEY_FILE,
    ca_path,
    constrained_context,
    server_context,
)

NOW = datetime.now(UTC)


def handshake(server: ssl.SSLContext, ca: Path, name: str) -> None:
    """Do a TLS handshake in memory, with a client as strict as OpenSSL can be."""
    client = ssl.create_default_context(cafile=ca)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(to_server, to_client, server_side=True)
    theirs = client.wrap_bio(to_client, to_server, server_hostname=name)
    unfinished = [theirs, ours]
    for _ in range(10):
        for side in list(unfinished):
            try:
                side.do_handshake()
                unfinished.remove(side)
            except ssl.SSLWantReadError:
                continue
    assert unfinished == []


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1", socket.gethostname(), "bus.example"])
def test_a_strict_client_trusts_the_server_under_all_its_names(tmp_path: Path, name: str) -> None:
    handshake(server_context(tmp_path, "bus.example"), ca_path(tmp_path), name)


def test_a_strict_client_refuses_a_name_the_server_was_not_given(tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server_context(tmp_path, "bus.example"), ca_path(tmp_path), "other.example")


def test_another_authority_is_not_trusted(tmp_path: Path) -> None:
    server_context(tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server_context(tmp_path / "ours"), ca_path(tmp_path / "other"), "localhost")


def test_only_the_owner_can_read_key_files(tmp_path: Path) -> None:
    server_context(tmp_path)
    for name in (CA_KEY_FILE, SERVER_KEY_FILE):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


def test_a_second_start_changes_nothing(tmp_path: Path) -> None:
    server_context(tmp_path, "a.example")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    server_context(tmp_path, "a.example")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_new_host_gets_a_new_certificate_of_the_same_authority_and_old_names_stay(tmp_path: Path) -> None:
    server_context(tmp_path, "a.example")
    authority = ca_path(tmp_path).read_bytes()
    context = server_context(tmp_path, "192.0.2.7")
    assert ca_path(tmp_path).read_bytes() == authority
    for name in ("192.0.2.7", "a.example", "localhost"):
        handshake(context, ca_path(tmp_path), name)


def test_the_server_certificate_is_renewed_before_it_expires(tmp_path: Path) -> None:
    server_context(tmp_path, now=NOW - timedelta(days=380))
    first, authority = certificate(tmp_path / SERVER_FILE), ca_path(tmp_path).read_bytes()
    context = server_context(tmp_path, now=NOW)
    assert certificate(tmp_path / SERVER_FILE).not_valid_after_utc > first.not_valid_after_utc
    assert ca_path(tmp_path).read_bytes() == authority
    handshake(context, ca_path(tmp_path), "localhost")


def test_an_authority_that_expires_soon_is_replaced_with_all_it_signed(tmp_path: Path) -> None:
    server_context(tmp_path, now=NOW - timedelta(days=3400))
    first = ca_path(tmp_path).read_bytes()
    context = server_context(tmp_path, now=NOW)
    assert ca_path(tmp_path).read_bytes() != first
    handshake(context, ca_path(tmp_path), "localhost")


@pytest.mark.parametrize("name", ["ca.pem", "ca.key", "server.pem", "server.key"])
@pytest.mark.parametrize("damage", [b"", b"not a certificate", None])
def test_a_damaged_or_missing_file_is_made_again(tmp_path: Path, name: str, damage: bytes | None) -> None:
    server_context(tmp_path)
    if damage is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(damage)
    handshake(server_context(tmp_path), ca_path(tmp_path), "localhost")


def test_certificates_carry_what_rfc_5280_asks_for(tmp_path: Path) -> None:
    server_context(tmp_path)
    ca, server = certificate(ca_path(tmp_path)), certificate(tmp_path / SERVER_FILE)
    identifier = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
    for signed in (ca, server):
        issuer = signed.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
        assert issuer.key_identifier == identifier
        assert signed.extensions.get_extension_for_class(x509.BasicConstraints).critical
        assert signed.extensions.get_extension_for_class(x509.KeyUsage).critical
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_wildcard_host_is_not_in_the_certificate(tmp_path: Path) -> None:
    server_context(tmp_path, "::")
    names = certificate(tmp_path / SERVER_FILE).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert ipaddress.ip_address("::") not in names.get_values_for_type(x509.IPAddress)


def test_processes_that_start_at_once_share_one_authority(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; "
        "from twinbus.namespace.front.certificates import server_context, ca_path; "
        "server_context(Path(sys.argv[1])); sys.stdout.write(ca_path(Path(sys.argv[1])).read_text())"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "new")]
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    starts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=where) for _ in range(4)]
    seen = {start.communicate(timeout=60)[0] for start in starts}
    assert [start.returncode for start in starts] == [0, 0, 0, 0]
    assert seen == {ca_path(tmp_path / "new").read_text()}
    handshake(server_context(tmp_path / "new"), ca_path(tmp_path / "new"), "localhost")


# --- names in Azure --------------------------------------------------------------------------------------------------

AZURE = ["contoso.servicebus.windows.net", "contoso-backup.servicebus.windows.net"]


def test_an_authority_for_names_in_azure_is_constrained_to_them_and_its_key_is_not_kept(tmp_path: Path) -> None:
    handshake(constrained_context(tmp_path, AZURE), tmp_path / "azure-ca.pem", AZURE[1])
    authority = x509.load_pem_x509_certificate((tmp_path / "azure-ca.pem").read_bytes())
    found = authority.extensions.get_extension_for_class(x509.NameConstraints)
    assert found.critical
    assert [name.value for name in found.value.permitted_subtrees or ()] == AZURE
    assert sorted(str(name.value) for name in found.value.excluded_subtrees or ()) == ["0.0.0.0/0", "::/0"]
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"azure-ca.pem", "azure-server.pem", "azure-server.key", "tls.lock"}
    assert (tmp_path / "azure-server.key").stat().st_mode & 0o077 == 0


def test_the_authority_stays_for_the_same_names_and_is_made_again_for_others(tmp_path: Path) -> None:
    constrained_context(tmp_path, AZURE)
    first = (tmp_path / "azure-ca.pem").read_bytes()
    constrained_context(tmp_path, AZURE)
    assert (tmp_path / "azure-ca.pem").read_bytes() == first
    constrained_context(tmp_path, AZURE[:1])
    assert (tmp_path / "azure-ca.pem").read_bytes() != first
    server = x509.load_pem_x509_certificate((tmp_path / "azure-server.pem").read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == AZURE[:1]


@pytest.mark.parametrize("name", ["evil.example", "servicebus.windows.net", "notcontoso.servicebus.windows.net"])
def test_no_client_accepts_what_the_authority_signs_for_another_name(tmp_path: Path, name: str) -> None:
    """As if the authority's key had been stolen before it was dropped."""
    authority, key = certificates.make_constrained_authority(AZURE, NOW)
    (tmp_path / "ca.pem").write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    for signed in (AZURE[0], name):
        made = certificates.make_server_certificate([x509.DNSName(signed)], authority, key, NOW)
        certificates._save(tmp_path / "s.pem", tmp_path / "s.key", *made)
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(tmp_path / "s.pem", tmp_path / "s.key")
        if signed == name:
            with pytest.raises(ssl.SSLCertVerificationError, match="permitted subtree violation"):
                handshake(server, tmp_path / "ca.pem", signed)
        else:
            handshake(server, tmp_path / "ca.pem", signed)
