"""Tests of what operators see. The whole system that they watch is started as in tests/integration."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
