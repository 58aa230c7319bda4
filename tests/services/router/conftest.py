"""Tests of the router share servers that the tests of whole systems use, too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "integration"))
