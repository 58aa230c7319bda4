"""Authorities and pods' certificates for tests of mutual TLS: real ones, of this moment, in files as pods get them."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from moot.rpc.identity import Identity


@dataclass(frozen=True, slots=True)
class Leaf:
    """One pod's certificate and key, in PEM form."""

    cert: bytes
    key: bytes
    serial_number: int


@dataclass(frozen=True, slots=True)
class PodFiles:
    """The three files of one pod in a folder of its own."""

    folder: Path

    @property
    def paths(self) -> tuple[Path, Path, Path]:
        """Certificate, key, authorities."""
        return self.folder / "tls.crt", self.folder / "tls.key", self.folder / "ca.crt"

    @property
    def flags(self) -> tuple[str, ...]:
        names = ("--tls-cert-file", "--tls-key-file", "--tls-ca-file")
        return tuple(part for name, path in zip(names, self.paths, strict=True) for part in (name, str(path)))

    def write(self, leaf: Leaf, *authorities: Authority) -> PodFiles:
        """Write the files, each replaced as a whole, one after the other: in between they do not fit together."""
        self.folder.mkdir(parents=True, exist_ok=True)
        contents = (leaf.cert, leaf.key, b"".join(authority.pem for authority in authorities))
        for path, content in zip(self.paths, contents, strict=True):
            if content:
                temporary = path.with_suffix(".new")
                temporary.write_bytes(content)
                temporary.replace(path)
        return self


@dataclass(slots=True)
class Authority:
    """Signs pods' certificates. Lifetimes from `starts` to `ends` days from now; negative: that was before.

    `issuer`: the authority that has signed this one's own certificate; None: itself.
    """

    name: str = "authority"
    starts: float = -1.0
    ends: float = 30.0
    issuer: Authority | None = None
    _key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    _cert: x509.Certificate | None = None

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def certificate(self) -> x509.Certificate:
        if self._cert is None:
            issuer = self.issuer or self
            builder = issuer._builder(_name(self.name), self._key, self.starts, self.ends)
            builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            self._cert = builder.sign(issuer._key, SHA256())
        return self._cert

    def issue(
        self,
        identity: Identity,
        *,
        starts: float = -1.0,
        ends: float = 20.0,
        uris: tuple[str, ...] | None = None,
        dns_names: tuple[str, ...] | None = None,
        uses: tuple[x509.ObjectIdentifier, ...] = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH),
        key: CertificateIssuerPrivateKeyTypes | None = None,
    ) -> Leaf:
        """A certificate for `key`, or for a new one. `uris`, `dns_names`: in place of what the identity says."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [
            *(x509.UniformResourceIdentifier(uri) for uri in (uris if uris is not None else (identity.uri,))),
            *(x509.DNSName(name) for name in (dns_names if dns_names is not None else (identity.server_name,))),
        ]
        builder = self._builder(x509.Name([]), key, starts, ends)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
        if uses:
            builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        cert = builder.sign(self._key, SHA256())
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Leaf(cert.public_bytes(Encoding.PEM), pem, cert.serial_number)

    def _builder(
        self, subject: x509.Name, key: CertificateIssuerPrivateKeyTypes, starts: float, ends: float
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(_name(self.name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + timedelta(days=starts))
            .not_valid_after(now + timedelta(days=ends))
        )


def shown_serial_number(address: str, server: Identity, caller: PodFiles) -> int:
    """Serial number of the certificate that the server at host:port shows to a caller with these files. Raises
    OSError."""
    cert, key, ca = caller.paths
    context = ssl.create_default_context(cafile=str(ca))
    context.load_cert_chain(cert, key)
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=20) as raw,
        context.wrap_socket(raw, server_hostname=server.server_name) as secure,
    ):
        der = secure.getpeercert(binary_form=True)
    if der is None:
        raise OSError("the server showed no certificate")
    return x509.load_der_x509_certificate(der).serial_number


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
