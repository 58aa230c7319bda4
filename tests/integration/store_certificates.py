"""Certificates of a test: an authority, and a pair of its own for 127.0.0.1."""

from __future__ import annotations

import subprocess
from pathlib import Path


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=30)


def make_certificates(folder: Path) -> Path:
    """An authority (ca.crt), and a pair of its own for 127.0.0.1 (tls.crt, tls.key)."""
    folder.mkdir()
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj")
    openssl(folder, "req", "-x509", *new, "/CN=authority", "-keyout", "ca.key", "-out", "ca.crt", "-days", "2")
    openssl(folder, "req", *new, "/CN=store", "-keyout", "tls.key", "-out", "tls.csr")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl(folder, "x509", "-req", "-in", "tls.csr", "-out", "tls.crt", *signed)
    return folder
