"""Why a peer could not be asked what it is, as far as gRPC tells: for logs, and for how soon to try again."""

from __future__ import annotations

import re

import grpc
import grpc.aio

from moot.core.errors import PeerLost, PeerRefused

# Texts of grpcio 1.85; what is not recognised is told as it is.
_UNTRUSTED = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([^:]+)")
_OTHER_NAME = "Hostname Verification Check failed"
_NO_TLS = "WRONG_VERSION_NUMBER"
_NEVER_CONNECTED = "failed to connect to all addresses"


def failure_of(error: grpc.aio.AioRpcError, server_name: str | None) -> PeerRefused | PeerLost:
    """PeerRefused where trying again at once is in vain. `server_name`: expected in the peer's certificate; None: no
    TLS here."""
    details = error.details() or ""
    if error.code() is grpc.StatusCode.PERMISSION_DENIED:
        return PeerRefused(details)
    if _OTHER_NAME in details:
        return PeerRefused(f"its certificate is not that of {server_name}")
    if match := _UNTRUSTED.search(details):
        return PeerRefused(f"its certificate is not trusted: {match[1]}")
    if _NO_TLS in details:
        return PeerRefused("it does not speak TLS, which this side does")
    if details.startswith(_NEVER_CONNECTED) and "Socket closed" in details:
        guess = "may want TLS" if server_name is None else "may refuse this side's certificate: its log says why"
        return PeerLost(f"it closed the connection before it answered; it {guess}")
    return PeerLost(f"{error.code().name}: {details}")
