"""Mutual TLS between pods, from files that may change while streams run.

Measured with grpcio 1.85. A server asks for its certificate at every handshake, so that the next connection gets the
new one and streams go on. A channel keeps the certificate that it was made with: routers make a new channel for every
connection. A server that refuses a client's certificate does not say so (TLS 1.3: the client sees `Socket closed`) but
writes the reason to its own log; a client that refuses a server's certificate says why.

Who a pod is: its namespace, release and role, as the one `moot://` URI in its certificate says.

A pod's certificate, key and authorities: read from files, and checked before anybody uses them.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from moot.config import flag_of, option
from moot.core.errors import ConfigError, PeerForbidden
from moot.runtime.metrics import Metrics

SCHEME = "moot://"
DOMAIN = "moot.internal"
ROLES = ("router", "verifier", "drafter")

# A namespace is one DNS label, a release may be several: https://helm.sh/docs/chart_best_practices/conventions/
_LABEL = "[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_URI = re.compile(rf"{SCHEME}({_LABEL})/({_LABEL}(?:\.{_LABEL})*)/({'|'.join(ROLES)})")


@dataclass(frozen=True, slots=True)
class Identity:
    """Two pods are of one installation when namespace and release are equal."""

    namespace: str
    release: str
    role: str

    @property
    def uri(self) -> str:
        return f"{SCHEME}{self.namespace}/{self.release}/{self.role}"

    @property
    def server_name(self) -> str:
        """The DNS name in its certificate. Pods are called by addresses that nobody knows beforehand, and a gRPC client
        compares one name with the server's certificate and nothing else: so this name says what the URI says."""
        return f"{self.role}.{self.release}.{self.namespace}.{DOMAIN}"

    def peer(self, role: str) -> Identity:
        """Who plays `role` in the same installation."""
        return replace(self, role=role)


def identity_of(uris: Iterable[str]) -> Identity:
    """The one among the URIs of a certificate, beside others. Raises ValueError saying what they hold instead."""
    mine = [uri for uri in uris if uri.startswith(SCHEME)]
    if not mine:
        raise ValueError(f"no URI {SCHEME}NAMESPACE/RELEASE/ROLE")
    if len(mine) > 1:
        raise ValueError(f"more than one {SCHEME} URI ({', '.join(mine)})")
    if (match := _URI.fullmatch(mine[0])) is None:
        raise ValueError(f"{mine[0]}, which is not {SCHEME}NAMESPACE/RELEASE/ROLE with role {', '.join(ROLES)}")
    return Identity(*match.groups())


CERT_FLAG, KEY_FLAG, CA_FLAG = "--tls-cert-file", "--tls-key-file", "--tls-ca-file"


@dataclass(frozen=True, slots=True)
class Pems:
    """What the three files hold, as it is."""

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
    """Raises ConfigError naming the flag whose file cannot be read."""
    return Pems(_read(CERT_FLAG, cert), _read(KEY_FLAG, key), _read(CA_FLAG, ca))


def check(pems: Pems, role: str, now: datetime) -> Certificates:
    """Raises ConfigError naming the flag whose file is no good for a pod of this role at the time `now`."""
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
    """From the pod's certificate, through others of its file, to the authority that lasts longest."""
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


_log = logging.getLogger("moot.tls")

REFRESH_S = 2.0
"""Seconds between looks at the files. The kubelet takes up to a minute to bring a Secret's change there."""


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """Where a pod's certificates are: all three, or none and plain text. Base of the services' configs."""

    tls_cert_file: Path | None = option(
        None, help="PEM file with this pod's certificate for mutual TLS between pods (none: plain text)"
    )
    tls_key_file: Path | None = option(None, help="PEM file with its private key")
    tls_ca_file: Path | None = option(None, help="PEM file with the authorities that other pods' certificates hang on")

    @property
    def tls_files(self) -> tuple[Path, Path, Path] | None:
        """Certificate, key, authorities. Raises ConfigError when some are given and others are not."""
        files = {name: getattr(self, name) for name in ("tls_cert_file", "tls_key_file", "tls_ca_file")}
        missing = [flag_of(name) for name, path in files.items() if path is None]
        if len(missing) == 3:
            return None
        if missing:
            raise ConfigError(f"{' and '.join(missing)}: the three --tls-*-file flags go together")
        cert, key, ca = files.values()
        return cert, key, ca


class PodTls:
    """One pod's certificates, kept up to date. `certificates` may be read from any thread.

    Raises ConfigError for files that no connection could be made with. Later ones of that kind are logged and left
    alone, and what was read before stays in use.
    """

    def __init__(self, files: tuple[Path, Path, Path], role: str, metrics: Metrics) -> None:

        self._read: Callable[[], Pems] = lambda: read_pems(*files)
        self._check: Callable[[Pems], Certificates] = lambda pems: check(pems, role, datetime.now(UTC))
        self._metrics = metrics
        self._refused: str | Pems | None = None
        self._ended: Certificates | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.certificates: Certificates = self._check(self._read())
        self._note("certificates read")

    @property
    def identity(self) -> Identity:
        return self.certificates.identity

    def watch(self) -> None:
        """Look at the files now and then, in a thread of its own, until `close`."""
        self._thread = threading.Thread(target=self._watch, name="tls files", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def refresh(self) -> bool:
        """Look at the files once. True when a new set of them is in use from now on."""
        try:
            pems = self._read()
        except ConfigError as error:
            self._refuse(str(error), error)
            return False
        if pems == self.certificates.pems:
            self._refused = None
            self._tell_end()
            return False
        try:
            found = self._check(pems)
            if found.identity != self.identity:
                raise ConfigError(f"the certificate is of {found.identity.uri}, and this pod is {self.identity.uri}")
        except ConfigError as error:
            self._refuse(pems, error)
            return False
        self._refused, self.certificates = None, found
        self._note("new certificates in use")
        return True

    def server_credentials(self) -> grpc.ServerCredentials:
        """They want a certificate of every client."""
        served = self.certificates

        def newer() -> grpc.ServerCertificateConfiguration | None:
            """Called by gRPC's threads, one at a time, at every handshake. None: what was served last."""
            nonlocal served
            if self.certificates is served:
                return None
            served = self.certificates
            return _configuration(served)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(served),
            newer,  # type: ignore[arg-type]  # the stubs do not know of None
            require_client_authentication=True,
        )

    def open_channel(self, address: str, role: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """To a pod that must prove that it plays `role` in this installation. Needs a running event loop."""
        pems = self.certificates.pems
        return grpc.aio.secure_channel(
            address,
            grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert),
            options=[*options, ("grpc.ssl_target_name_override", self.identity.peer(role).server_name)],
        )

    def admit(self, caller_role: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Raises PeerForbidden unless the caller's certificate says `caller_role` of this installation."""
        wanted = self.identity.peer(caller_role)
        try:
            caller = identity_of(uri.decode() for uri in context.auth_context().get("peer_uri", ()))
        except ValueError as error:
            seen = f"a certificate with {error}"
        else:
            if caller == wanted:
                return
            seen = f"role {caller.role} ({caller.uri})"
        _log.error("caller refused", extra={"caller": context.peer(), "expected": wanted.uri, "seen": seen})
        raise PeerForbidden(f"this {self.identity.role} expects role {wanted.role} ({wanted.uri}), and saw {seen}")

    def _watch(self) -> None:
        while not self._stop.wait(REFRESH_S):
            try:
                self.refresh()
            except Exception:  # noqa: BLE001 - whatever it is, the next files must be seen
                _log.exception("certificate files not looked at")

    def _refuse(self, what: str | Pems, error: ConfigError) -> None:
        """Half-written files are seen again and again: said once."""
        if what != self._refused:
            self._refused = what
            _log.warning("certificate files not taken, the former stay in use", extra={"reason": str(error)})

    def _tell_end(self) -> None:
        now = self.certificates
        if self._ended is not now and time.time() >= min(now.ends_at, now.ca_ends_at):
            self._ended = now
            _log.error("the certificates in use have ended", extra={"serial_number": f"{now.serial_number:x}"})

    def _note(self, what: str) -> None:
        now = self.certificates
        self._metrics.certificate_expiry_timestamp_seconds.labels("own").set(now.ends_at)
        self._metrics.certificate_expiry_timestamp_seconds.labels("ca").set(now.ca_ends_at)
        _log.info(
            what,
            extra={
                "identity": now.identity.uri,
                "serial_number": f"{now.serial_number:x}",
                "valid_days": round((now.ends_at - time.time()) / 86400, 1),
            },
        )


def open_tls(options: TlsOptions, role: str, metrics: Metrics) -> PodTls | None:
    """What the options ask for; None: plain text. Raises ConfigError naming the flag that is wrong."""
    files = options.tls_files
    return None if files is None else PodTls(files, role, metrics)


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pems = certificates.pems
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], root_certificates=pems.ca)
