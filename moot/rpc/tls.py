"""Mutual TLS between pods, from files that may change while streams run.

Measured with grpcio 1.85. A server asks for its certificate at every handshake, so that the next connection gets the
new one and streams go on. A channel keeps the certificate that it was made with: routers make a new channel for every
connection. A server that refuses a client's certificate does not say so (TLS 1.3: the client sees `Socket closed`) but
writes the reason to its own log; a client that refuses a server's certificate says why.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from moot.config import flag_of
from moot.core.errors import ConfigError, PeerForbidden
from moot.core.options import Options, option
from moot.rpc.identity import Identity, identity_of
from moot.runtime.metrics import Metrics

if TYPE_CHECKING:  # a library of its own, which only pods with certificates load
    from moot.rpc.certificates import Certificates, Pems

_log = logging.getLogger("moot.tls")

REFRESH_S = 2.0
"""Seconds between looks at the files. The kubelet takes up to a minute to bring a Secret's change there."""


@dataclass(frozen=True, kw_only=True)
class TlsOptions(Options):
    """The files of a pod's certificates: all three, or none and plain text."""

    tls_cert_file: Path | None = option(
        None, help="PEM file with this pod's certificate for mutual TLS between pods (none: plain text)"
    )
    tls_key_file: Path | None = option(None, help="PEM file with its private key")
    tls_ca_file: Path | None = option(None, help="PEM file with the authorities that sign other pods' certificates")

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
        from moot.rpc.certificates import check, read_pems

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
        """Look at the files now and then, in a separate thread, until `close`."""
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
        """Credentials that want a certificate of every client."""
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
        """A channel to a pod that must prove that it plays `role` in this installation. Needs a running event loop."""
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
        """Log that files are refused, once: half-written files are seen again and again."""
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
    """The certificates that the options name; None: plain text. Raises ConfigError naming the flag that is wrong."""
    files = options.tls_files
    return None if files is None else PodTls(files, role, metrics)


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pems = certificates.pems
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], root_certificates=pems.ca)
