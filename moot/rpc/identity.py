"""The identity of a pod: namespace, release and role, as the one `moot://` URI in its certificate says."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

SCHEME = "moot://"
DOMAIN = "moot.internal"
ROLES = ("router", "verifier", "drafter")

# A namespace is one DNS label, a release may be several: https://helm.sh/docs/chart_best_practices/conventions/
_LABEL = "[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_URI = re.compile(rf"{SCHEME}({_LABEL})/({_LABEL}(?:\.{_LABEL})*)/({'|'.join(ROLES)})")


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a pod. Two pods are of one installation when namespace and release are equal."""

    namespace: str
    release: str
    role: str

    @property
    def uri(self) -> str:
        return f"{SCHEME}{self.namespace}/{self.release}/{self.role}"

    @property
    def server_name(self) -> str:
        """The DNS name in its certificate. Pods are called by addresses that are not known beforehand, and a gRPC
        client compares one name with the server's certificate and nothing else: so this name says what the URI says."""
        return f"{self.role}.{self.release}.{self.namespace}.{DOMAIN}"

    def peer(self, role: str) -> Identity:
        """The identity of the pod that plays `role` in the same installation."""
        return replace(self, role=role)


def identity_of(uris: Iterable[str]) -> Identity:
    """The identity in a certificate, one of its URIs beside others. Raises ValueError saying what they hold instead."""
    mine = [uri for uri in uris if uri.startswith(SCHEME)]
    if not mine:
        raise ValueError(f"no URI {SCHEME}NAMESPACE/RELEASE/ROLE")
    if len(mine) > 1:
        raise ValueError(f"more than one {SCHEME} URI ({', '.join(mine)})")
    if (match := _URI.fullmatch(mine[0])) is None:
        raise ValueError(f"{mine[0]}, which is not {SCHEME}NAMESPACE/RELEASE/ROLE with role {', '.join(ROLES)}")
    return Identity(*match.groups())
