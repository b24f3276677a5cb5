"""The local certificate authority, and the server certificate that the authority signs. Both are files in a directory.

Both certificates are made at the first start and renewed before they expire. Both satisfy strict verifiers (RFC 5280
profile: basic constraints, key usage, key identifiers). Key files have the mode 0600. A lock file prevents that two
processes that start at the same time make two authorities.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from twinbus.namespace.own_names import is_wildcard

CA_FILE: Final = "ca.pem"
CA_KEY_FILE: Final = "ca.key"
SERVER_FILE: Final = "server.pem"
SERVER_KEY_FILE: Final = "server.key"
LOCK_FILE: Final = "tls.lock"
AZURE_CA_FILE: Final = "azure-ca.pem"
AZURE_SERVER_FILE: Final = "azure-server.pem"
AZURE_SERVER_KEY_FILE: Final = "azure-server.key"

_CA_VALIDITY: Final = timedelta(days=3650)
# Apple and others refuse server certificates that are valid for more than 825 days.
_SERVER_VALIDITY: Final = timedelta(days=397)
_RENEW_BEFORE: Final = timedelta(days=30)
_BACKDATE: Final = timedelta(hours=1)
_MAX_COMMON_NAME: Final = 64


def ca_path(directory: Path) -> Path:
    """Return the file with the authority's certificate, which clients must trust."""
    return directory / CA_FILE


def server_context(
    directory: Path, host: str = "localhost", *others: str, now: datetime | None = None
) -> ssl.SSLContext:
    """Return the TLS context of the server. Makes or renews certificates if needed. Blocks on the disk.

    The certificate is for the loopback addresses, the host name of this machine, `host`, and `others`.
    """
    now = now or datetime.now(UTC)
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory / LOCK_FILE):
        authority, authority_key = _ensure_authority(directory, now)
        _ensure_server_certificate(directory, certificate_names(host, *others), authority, authority_key, now)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(directory / SERVER_FILE, directory / SERVER_KEY_FILE)
    return context


def azure_ca_path(directory: Path) -> Path:
    """Return the file with the certificate of the authority for `--azure-names`."""
    return directory / AZURE_CA_FILE


def constrained_context(directory: Path, names: Sequence[str], now: datetime | None = None) -> ssl.SSLContext:
    """Return the TLS context of a server for exactly these host names. Blocks on the disk.

    Makes an authority and a certificate if there are none for these names, or if they expire soon. The authority is
    constrained to the names, and its key is dropped as soon as it has signed: users put this authority into the store
    of their system.
    """
    now = now or datetime.now(UTC)
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory / LOCK_FILE):
        wanted = [x509.DNSName(name) for name in names]
        kept = _load(directory / AZURE_SERVER_FILE, directory / AZURE_SERVER_KEY_FILE)
        authority = _load_certificate(azure_ca_path(directory))
        is_kept = kept is not None and authority is not None and _is_usable(kept[0], list(wanted), authority, now)
        if kept is None or not is_kept or set(_alternative_names(kept[0])) != set(wanted):
            made, key = make_constrained_authority(names, now)
            certificate, certificate_key = make_server_certificate(list(wanted), made, key, now)
            _save(directory / AZURE_SERVER_FILE, directory / AZURE_SERVER_KEY_FILE, certificate, certificate_key)
            _replace(azure_ca_path(directory), made.public_bytes(serialization.Encoding.PEM), 0o644)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(directory / AZURE_SERVER_FILE, directory / AZURE_SERVER_KEY_FILE)
    return context


def make_constrained_authority(
    names: Sequence[str], now: datetime
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return an authority that may sign server certificates for these host names, and for no address."""
    constraints = x509.NameConstraints(
        permitted_subtrees=[x509.DNSName(name) for name in names],
        excluded_subtrees=[x509.IPAddress(ipaddress.ip_network(all_of)) for all_of in ("0.0.0.0/0", "::/0")],
    )
    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    builder = _authority_builder(key, "Twinbus CA for names in Azure", now, _SERVER_VALIDITY)
    builder = builder.add_extension(constraints, critical=True).add_extension(usage, critical=False)
    return builder.sign(key, hashes.SHA256()), key


def certificate_names(*hosts: str) -> list[x509.GeneralName]:
    """Return the names for the certificate: loopback, the host name of this machine, and the given hosts."""
    wanted = ["localhost", "127.0.0.1", "::1", socket.gethostname(), *(host.strip("[]") for host in hosts)]
    found: dict[str, x509.GeneralName] = {}
    for name in wanted:
        if is_wildcard(name):
            continue
        try:
            found[name.lower()] = x509.IPAddress(ipaddress.ip_address(name))
        except ValueError:
            ascii_name = name.encode("idna").decode() if not name.isascii() else name
            found[name.lower()] = x509.DNSName(ascii_name.lower())
    return list(found.values())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _ensure_authority(directory: Path, now: datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    kept = _load(directory / CA_FILE, directory / CA_KEY_FILE)
    if kept is not None and kept[0].not_valid_after_utc - now > _SERVER_VALIDITY:
        return kept
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _authority_builder(key, "Twinbus local CA", now, _CA_VALIDITY).sign(key, hashes.SHA256())
    _save(directory / CA_FILE, directory / CA_KEY_FILE, certificate, key)
    return certificate, key


def _authority_builder(
    key: ec.EllipticCurvePrivateKey, title: str, now: datetime, validity: timedelta
) -> x509.CertificateBuilder:
    # The name contains the key's identifier, so that a client can trust several local authorities at the same time.
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    name = _name(f"{title} {identifier.digest.hex()[:8]}")
    return (
        _builder(name, name, key.public_key(), now, validity)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    )


def _ensure_server_certificate(
    directory: Path,
    wanted: list[x509.GeneralName],
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    now: datetime,
) -> None:
    kept = _load(directory / SERVER_FILE, directory / SERVER_KEY_FILE)
    if kept is not None and _is_usable(kept[0], wanted, authority, now):
        return
    if kept is not None:
        # Another server that uses this directory may have another host. The names of that host stay in the certificate.
        wanted = list(dict.fromkeys([*wanted, *_alternative_names(kept[0])]))
    certificate, key = make_server_certificate(wanted, authority, authority_key, now)
    _save(directory / SERVER_FILE, directory / SERVER_KEY_FILE, certificate, key)


def make_server_certificate(
    names: list[x509.GeneralName], authority: x509.Certificate, authority_key: ec.EllipticCurvePrivateKey, now: datetime
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return a certificate of a server for these names, signed by the authority, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    certificate = (
        _builder(_name("Twinbus namespace"), authority.subject, key.public_key(), now, _SERVER_VALIDITY)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return certificate, key


def _is_usable(
    certificate: x509.Certificate, wanted: list[x509.GeneralName], authority: x509.Certificate, now: datetime
) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return certificate.not_valid_after_utc - now > _RENEW_BEFORE and set(wanted) <= set(_alternative_names(certificate))


def _alternative_names(certificate: x509.Certificate) -> list[x509.GeneralName]:
    try:
        return list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        return []


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, validity: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATE)
        .not_valid_after(now + validity)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:_MAX_COMMON_NAME])])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _load(certificate_path: Path, key_path: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None:
    """Return certificate and key from disk, or None if they are absent, damaged or do not match."""
    try:
        certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or certificate.public_key() != key.public_key():
        return None
    return certificate, key


def _load_certificate(path: Path) -> x509.Certificate | None:
    """Return the certificate of a file, or None if it is absent or damaged."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _save(
    certificate_path: Path, key_path: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> None:
    # The key is written first. After a crash between the two writes, key and certificate do not match, and the next
    # start makes both again.
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _replace(key_path, pem, 0o600)
    _replace(certificate_path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def _replace(path: Path, content: bytes, mode: int) -> None:
    unfinished = path.with_name(path.name + ".new")
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
