"""Measurements that anyone can rerun: `python -m lab.bench.NAME` measures and writes docs/results/NAME.md."""

from pathlib import Path

ROOMS = ("forward", "replays", "router", "system", "virtual")
# A command is named by what it measures, not by its room: `python -m lab.bench.load` is lab/bench/system/load.py.
__path__ += [str(Path(__file__).parent / room) for room in ROOMS]
