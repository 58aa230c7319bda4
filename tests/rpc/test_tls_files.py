"""Certificate files: what a pod would not be known by is refused at the start, by flag, and never taken later."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID

from moot.config import load_config
from moot.core.errors import ConfigError
from moot.rpc.identity import Identity, identity_of
from moot.rpc.tls import PodTls, TlsOptions, open_tls
from moot.runtime.metrics import Metrics
from moot.testing.made_certificates import Authority, Leaf, PodFiles

ROUTER = Identity("prod", "demo", "router")
VERIFIER = ROUTER.peer("verifier")
OURS = Authority()


def opened(files: PodFiles, role: str = "verifier") -> PodTls:
    return PodTls(files.paths, role, Metrics(role))


def files_in(folder: Path, leaf: Leaf | None = None, *authorities: Authority) -> PodFiles:
    return PodFiles(folder).write(leaf or OURS.issue(VERIFIER), *(authorities or (OURS,)))


def encrypted(key: bytes) -> bytes:
    return load_pem_private_key(key, None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )


def spoilt(**changes: bytes) -> Leaf:
    return dataclasses.replace(OURS.issue(VERIFIER), **changes)


BAD: dict[str, tuple[Callable[[], Leaf], str]] = {
    "expired": (lambda: OURS.issue(VERIFIER, starts=-3, ends=-1), "--tls-cert-file: .* has expired on 20"),
    "not yet valid": (lambda: OURS.issue(VERIFIER, starts=1), "--tls-cert-file: .* is not valid before 20"),
    "another key": (
        lambda: spoilt(key=OURS.issue(VERIFIER).key),
        "--tls-key-file: it is not the key of the certificate in --tls-cert-file",
    ),
    "a key with a password": (
        lambda: spoilt(key=encrypted(OURS.issue(VERIFIER).key)),
        "--tls-key-file: the key is encrypted; it must be readable without a password",
    ),
    "no key": (lambda: spoilt(key=b"what is this"), "--tls-key-file: it holds no private key in PEM form"),
    "Ed25519": (
        lambda: OURS.issue(VERIFIER, key=ed25519.Ed25519PrivateKey.generate()),
        "--tls-key-file: gRPC takes keys for ECDSA on P-256 or P-384, or RSA, and this is another kind",
    ),
    "P-521": (
        lambda: OURS.issue(VERIFIER, key=ec.generate_private_key(ec.SECP521R1())),
        "--tls-key-file: gRPC takes keys for ECDSA on P-256 or P-384, or RSA, and this is another kind",
    ),
    "no certificate": (lambda: spoilt(cert=b"nor this"), "--tls-cert-file: it holds no certificate in PEM form"),
    "no role": (lambda: OURS.issue(VERIFIER, uris=()), "--tls-cert-file: .* hold no URI moot://NAMESPACE/RELEASE/ROLE"),
    "no names at all": (lambda: OURS.issue(VERIFIER, uris=(), dns_names=()), "--tls-cert-file: .* hold no URI moot://"),
    "two roles": (
        lambda: OURS.issue(VERIFIER, uris=(VERIFIER.uri, ROUTER.uri)),
        "--tls-cert-file: .* hold more than one moot:// URI",
    ),
    "an unknown role": (
        lambda: OURS.issue(VERIFIER, uris=("moot://prod/demo/judge",)),
        "--tls-cert-file: .* hold moot://prod/demo/judge, which is not",
    ),
    "another role": (
        lambda: OURS.issue(VERIFIER.peer("drafter")),
        r"--tls-cert-file: the certificate is of a drafter \(moot://prod/demo/drafter\), this is a verifier",
    ),
    "no name to be called by": (
        lambda: OURS.issue(VERIFIER, dns_names=("drafter.demo.prod.moot.internal",)),
        "--tls-cert-file: .* lack DNS:verifier.demo.prod.moot.internal",
    ),
    "for clients only": (
        lambda: OURS.issue(VERIFIER, uses=(ExtendedKeyUsageOID.CLIENT_AUTH,)),
        "--tls-cert-file: .* extended key usage lacks serverAuth",
    ),
    "another authority's": (
        lambda: Authority().issue(VERIFIER),
        "--tls-cert-file: it is signed by none of the authorities in --tls-ca-file",
    ),
}


@pytest.mark.parametrize("mistake", BAD)
def test_a_certificate_nobody_would_accept_is_refused_at_the_start(tmp_path: Path, mistake: str) -> None:
    """One sentence that begins with the flag; without it, every peer's handshake would fail one by one."""
    make, expected = BAD[mistake]
    with pytest.raises(ConfigError, match=f"^{expected}"):
        opened(files_in(tmp_path, make()))


def test_files_that_cannot_be_read_and_flags_without_each_other_are_named(tmp_path: Path) -> None:
    """Missing, no authorities, an ended authority; and of the three flags all are given or none."""
    files = files_in(tmp_path / "pod")
    for flag, path in zip(("cert", "key", "ca"), files.paths, strict=True):
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(ConfigError, match=f"^--tls-{flag}-file: cannot read {path}: No such file"):
            opened(files)
        path.mkdir()
        with pytest.raises(ConfigError, match=f"^--tls-{flag}-file: cannot read {path}: Is a directory"):
            opened(files)
        path.rmdir()
        path.write_bytes(content)
    files.paths[2].write_bytes(b"")
    with pytest.raises(ConfigError, match="^--tls-ca-file: it holds no certificate in PEM form"):
        opened(files)
    ended = Authority("ended", starts=-9, ends=-1)
    with pytest.raises(ConfigError, match="^--tls-ca-file: .* has expired on 20"):
        opened(files_in(tmp_path / "ended", ended.issue(VERIFIER), ended))
    assert open_tls(load_config(TlsOptions, [], {}), "verifier", Metrics("verifier")) is None
    with pytest.raises(ConfigError, match="^--tls-key-file and --tls-ca-file: the three --tls-"):
        open_tls(load_config(TlsOptions, [], {"MOOT_TLS_CERT_FILE": "x"}), "verifier", Metrics("verifier"))


def test_an_unreadable_key_is_named() -> None:
    """A Secret mounted for another user. Nothing is unreadable to root, so the reader takes another user's place."""
    script = (
        "import os, sys\nfrom pathlib import Path\n"
        "from moot.core.errors import ConfigError\nfrom moot.rpc.certificates import read_pems\n"
        "if os.geteuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "try: read_pems(*map(Path, sys.argv[1:]))\n"
        "except ConfigError as error: print(error)"
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        files = files_in(Path(folder))
        files.paths[1].chmod(0o600 if os.geteuid() == 0 else 0)
        command = [sys.executable, "-c", script, *map(str, files.paths)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said == f"--tls-key-file: cannot read {files.paths[1]}: Permission denied\n"


def test_a_router_needs_a_certificate_to_call_with_and_no_name_to_be_called_by(tmp_path: Path) -> None:
    """Nobody calls a router by its certificate's name; what it calls with must be for clients."""
    assert opened(files_in(tmp_path / "a", OURS.issue(ROUTER, dns_names=())), "router").identity == ROUTER
    with pytest.raises(ConfigError, match="extended key usage lacks clientAuth"):
        opened(files_in(tmp_path / "b", OURS.issue(ROUTER, uses=(ExtendedKeyUsageOID.SERVER_AUTH,))), "router")


def test_names_say_who_it_is_without_a_doubt() -> None:
    """A release with dots, other URIs beside ours; and no two identities share a server name."""
    dotted = Identity("ns", "a.b", "drafter")
    assert identity_of(["spiffe://x/y", dotted.uri]) == dotted
    assert dotted.server_name == "drafter.a.b.ns.moot.internal"
    for bad in (
        "moot://ns/rel",
        "moot://ns/rel/router/x",
        "moot://NS/rel/router",
        "moot:///rel/router",
        "moot://n.s/r/router",
    ):
        with pytest.raises(ValueError, match="which is not moot://NAMESPACE/RELEASE/ROLE"):
            identity_of([bad])
    some = [Identity(n, r, o) for n in ("a", "b") for r in ("a", "b", "a.b", "b.a") for o in ("router", "drafter")]
    assert len({one.server_name for one in some}) == len({one.uri for one in some}) == len(some)


def test_a_chain_may_have_certificates_between(tmp_path: Path) -> None:
    """Leaf, intermediate, root; the first end of leaf and intermediate is the one that is told."""
    root = Authority("root")
    between = Authority("between", ends=5, issuer=root)
    leaf = between.issue(VERIFIER, ends=9)
    files = files_in(tmp_path, dataclasses.replace(leaf, cert=leaf.cert + between.pem), root)
    found = opened(files).certificates
    assert found.ends_at == between.certificate.not_valid_after_utc.timestamp()
    assert found.ca_ends_at == root.certificate.not_valid_after_utc.timestamp()
    with pytest.raises(ConfigError, match="signed by none of the authorities"):
        opened(files_in(tmp_path / "alone", leaf, root))


def test_new_files_are_taken_once_they_fit_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A half-written set is left alone and said once; the whole one is taken, and the metric follows."""
    caplog.set_level(logging.INFO)
    files = files_in(tmp_path, OURS.issue(VERIFIER, ends=3))
    metrics = Metrics("verifier")
    tls = PodTls(files.paths, "verifier", metrics)
    before = tls.certificates

    def told(certificate: str) -> float:
        return float(metrics.certificate_expiry_timestamp_seconds.labels(certificate)._value.get())

    assert told("own") == before.ends_at
    assert told("ca") == OURS.certificate.not_valid_after_utc.timestamp()
    assert not tls.refresh()
    newer = OURS.issue(VERIFIER, ends=8)
    cert = files.paths[0]
    halves = [
        (lambda: cert.write_bytes(newer.cert), "--tls-key-file: it is not the key"),
        (lambda: cert.write_bytes(newer.cert[:200]), "--tls-cert-file: it holds no certificate"),
        (lambda: cert.unlink(), "--tls-cert-file: cannot read"),
        (lambda: files_in(tmp_path, OURS.issue(VERIFIER.peer("drafter"))), "the certificate is of a drafter"),
        (
            lambda: files_in(tmp_path, OURS.issue(Identity("prod", "other", "verifier"))),
            "the certificate is of moot://prod/other/verifier, and this pod is moot://prod/demo/verifier",
        ),
    ]
    for spoil, reason in halves:
        caplog.clear()
        spoil()
        assert not tls.refresh()
        assert not tls.refresh()
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert reason in vars(record)["reason"]
        assert tls.certificates is before
        assert told("own") == before.ends_at
    caplog.clear()
    files.write(newer, OURS)
    assert tls.refresh()
    assert tls.certificates.serial_number == newer.serial_number
    assert told("own") == tls.certificates.ends_at > before.ends_at
    assert vars(caplog.records[-1])["serial_number"] == f"{newer.serial_number:x}"
    assert not tls.refresh()
    for secret in (newer.key, before.pems.key):
        assert secret.splitlines()[1].decode() not in caplog.text + repr(tls.certificates)


def test_a_bundle_may_hold_an_authority_that_has_ended(tmp_path: Path) -> None:
    """What counts is the one that the own certificate hangs on: an alarm about another one could not be silenced."""
    old, new = Authority("old", starts=-9, ends=-1), Authority("new", ends=7)
    tls = opened(files_in(tmp_path, new.issue(VERIFIER), old, new))
    assert tls.certificates.ca_ends_at == new.certificate.not_valid_after_utc.timestamp()


def test_processes_without_certificates_load_no_library_for_them() -> None:
    """Plain text costs nothing: neither time nor memory."""
    modules = "services.router.peers.links, moot.rpc.grpc_server, moot.testing"
    script = f"import sys, {modules}; print('cryptography' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.strip() == "False"
