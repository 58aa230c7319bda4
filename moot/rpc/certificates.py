"""A pod's certificate, key and authorities: read from files, and checked before they are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from moot.core.errors import ConfigError
from moot.rpc.identity import Identity, identity_of

CERT_FLAG, KEY_FLAG, CA_FLAG = "--tls-cert-file", "--tls-key-file", "--tls-ca-file"


@dataclass(frozen=True, slots=True)
class Pems:
    """The content of the three files, as it is."""

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes


@dataclass(frozen=True, slots=True)
class Certificates:
    """A set of files that fits together. Ends in seconds of Unix time."""

    pems: Pems
    identity: Identity
    serial_number: int
    ends_at: float
    """Of the pod's own certificate, or of one between it and its authority, whichever is first."""
    ca_ends_at: float
    """Of the authority that it hangs on; others in the file may be on their way in or out."""


def read_pems(cert: Path, key: Path, ca: Path) -> Pems:
    """Read the three files. Raises ConfigError naming the flag whose file cannot be read."""
    return Pems(_read(CERT_FLAG, cert), _read(KEY_FLAG, key), _read(CA_FLAG, ca))


def check(pems: Pems, role: str, now: datetime) -> Certificates:
    """The certificates that fit together. Raises ConfigError naming the flag whose file is no good for a pod of this
    role at the time `now`."""
    chain, authorities = _certificates(CERT_FLAG, pems.cert), _certificates(CA_FLAG, pems.ca)
    leaf = chain[0]
    if _public_key_of(pems.key) != _spki(leaf):
        raise ConfigError(f"{KEY_FLAG}: it is not the key of the certificate in {CERT_FLAG}")
    path = _path(chain, authorities)
    for flag, one in [(CERT_FLAG, one) for one in path[:-1]] + [(CA_FLAG, path[-1])]:
        if now < one.not_valid_before_utc:
            raise ConfigError(f"{flag}: {_told(one)} is not valid before {one.not_valid_before_utc:%Y-%m-%dT%H:%M:%SZ}")
        if now >= one.not_valid_after_utc:
            raise ConfigError(f"{flag}: {_told(one)} has expired on {one.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}")
    identity = _identity(leaf, role)
    _check_use(leaf, role)
    return Certificates(
        pems,
        identity,
        leaf.serial_number,
        min(one.not_valid_after_utc.timestamp() for one in path[:-1]),
        path[-1].not_valid_after_utc.timestamp(),
    )


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror or error}") from error


def _certificates(flag: str, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"{flag}: it holds no certificate in PEM form") from error


def _public_key_of(pem: bytes) -> bytes:
    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError as error:
        raise ConfigError(f"{KEY_FLAG}: the key is encrypted; it must be readable without a password") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        # Not what the library says: it may quote the file.
        raise ConfigError(f"{KEY_FLAG}: it holds no private key in PEM form") from error
    # Measured with grpcio 1.85: with P-521 and Ed25519 every handshake fails for want of a common algorithm.
    is_curve = isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP256R1 | ec.SECP384R1)
    if not is_curve and not isinstance(key, rsa.RSAPrivateKey):
        raise ConfigError(f"{KEY_FLAG}: gRPC takes keys for ECDSA on P-256 or P-384, or RSA, and this is another kind")
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _spki(certificate: x509.Certificate) -> bytes:
    return certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _path(chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]) -> list[x509.Certificate]:
    """The chain from the pod's certificate, through others of its file, to the authority that lasts longest."""
    anchors = sorted(authorities, key=lambda one: one.not_valid_after_utc, reverse=True)
    path = [chain[0]]
    while True:
        if anchor := next((one for one in anchors if _issued(path[-1], one)), None):
            return [*path, anchor]
        between = next((one for one in chain[1:] if one not in path and _issued(path[-1], one)), None)
        if between is None:
            raise ConfigError(f"{CERT_FLAG}: it is signed by none of the authorities in {CA_FLAG}")
        path.append(between)


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _identity(leaf: x509.Certificate, role: str) -> Identity:
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        names = x509.SubjectAlternativeName([])
    try:
        identity = identity_of(names.get_values_for_type(x509.UniformResourceIdentifier))
    except ValueError as error:
        raise ConfigError(f"{CERT_FLAG}: the certificate's alternative names hold {error}") from error
    if identity.role != role:
        raise ConfigError(f"{CERT_FLAG}: the certificate is of a {identity.role} ({identity.uri}), this is a {role}")
    if role != "router" and identity.server_name not in names.get_values_for_type(x509.DNSName):
        raise ConfigError(
            f"{CERT_FLAG}: the certificate's alternative names lack DNS:{identity.server_name}, "
            "by which a router knows the server"
        )
    return identity


def _check_use(leaf: x509.Certificate, role: str) -> None:
    try:
        allowed = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return
    name = "clientAuth" if role == "router" else "serverAuth"
    wanted = ExtendedKeyUsageOID.CLIENT_AUTH if role == "router" else ExtendedKeyUsageOID.SERVER_AUTH
    if wanted not in allowed and ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE not in allowed:
        raise ConfigError(f"{CERT_FLAG}: the certificate's extended key usage lacks {name}")


def _told(certificate: x509.Certificate) -> str:
    return f"the certificate with serial number {certificate.serial_number:x}"
