"""Init container: fetch a model of a hub at a revision, check every file named against its sha256, publish it whole.

The folder appears by a rename when everything in it is there and right, so that pods that share a volume may all run
this at once, and one that dies half-way leaves nothing that looks like a model.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
import uuid
from pathlib import Path

MARKER = ".fetched.json"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.gguf")
NEEDED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*")
"""Beside the weights. Nothing that could be executed, and no pickled weights."""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repository", required=True, help="hub id")
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--revision")
    parser.add_argument("--without-weights", action="store_true")
    parser.add_argument("--timeout-s", type=int, default=3600)
    parser.add_argument("--sha256", action="append", default=[], help="FILE=DIGEST, once per file")
    options = parser.parse_args()
    expected = dict(pair.rsplit("=", 1) for pair in options.sha256)
    wanted = {"repository": options.repository, "revision": options.revision, "sha256": expected}
    if is_published(options.folder, wanted):
        print(f"{options.folder} is there")
        return None
    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(options.timeout_s)
    options.folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = options.folder.parent / f".{options.folder.name}-{uuid.uuid4().hex}"
    try:
        download(options, scratch)
        if fault := mismatch(scratch, expected):
            return fault
        (scratch / MARKER).write_text(json.dumps(wanted))
        publish(scratch, options.folder, wanted)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"{options.folder} fetched")
    return None


def out_of_time(number, frame):
    raise TimeoutError("the hub took too long: model.hub.timeoutSeconds")


def download(options, scratch):
    from huggingface_hub import snapshot_download

    patterns = NEEDED if options.without_weights else (*NEEDED, *WEIGHTS)
    snapshot_download(
        options.repository,
        revision=options.revision,
        local_dir=scratch,
        allow_patterns=list(patterns),
        ignore_patterns=list(WEIGHTS) if options.without_weights else None,
    )
    shutil.rmtree(scratch / ".cache", ignore_errors=True)


def mismatch(folder, expected):
    """What is wrong with the files, as a sentence; none are named: nothing is checked."""
    if not expected:
        return None
    for name, digest in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} has a checksum, and is not in the repository"
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != digest.lower():
            return f"{name}: sha256 is {found}, not {digest}"
    unchecked = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.safetensors")
        if path.relative_to(folder).as_posix() not in expected
    )
    return f"weights without a checksum: {', '.join(unchecked)}" if unchecked else None


def is_published(folder, wanted):
    try:
        return json.loads((folder / MARKER).read_text()) == wanted
    except (OSError, ValueError):
        return False


def publish(scratch, folder, wanted):
    """Another pod may have been faster: then its folder stays."""
    if folder.exists() and not is_published(folder, wanted):
        aside = folder.parent / f".{folder.name}-{uuid.uuid4().hex}"
        os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)
    try:
        os.rename(scratch, folder)
    except OSError:
        if not is_published(folder, wanted):
            raise


if __name__ == "__main__":
    sys.exit(main())
