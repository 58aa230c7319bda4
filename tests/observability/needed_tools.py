"""Tools that only these tests need. Where one cannot be had the test is skipped; CI installs them all, and must."""

from __future__ import annotations

import importlib
import os
import shutil
from typing import Any

import pytest


def program(name: str) -> str:
    """The path of prometheus or promtool, both of Debian's package prometheus."""
    return shutil.which(name) or _missing(f"{name} is not here: apt-get install --no-install-recommends prometheus")


def module(name: str, package: str) -> Any:
    """A Python module of the package on PyPI."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return _missing(f"{name} is not here: pip install {package}", allow_module_level=True)


def _missing(reason: str, *, allow_module_level: bool = False) -> Any:
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=allow_module_level)
