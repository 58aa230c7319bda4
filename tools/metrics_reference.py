"""The tables of docs/metrics.md, made from the metrics that the services register.

python tools/metrics_reference.py            write them
python tools/metrics_reference.py --check    exit status 1 if they are not what the registries say
"""

from __future__ import annotations

import sys
from pathlib import Path

from generated import write_or_check

from moot.runtime.metrics import SERVICES, Definition, Metrics

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


def table() -> str:
    lines: list[str] = []
    definitions = Metrics().definitions
    for service in SERVICES:
        lines += [
            "",
            f"## {service.capitalize()}",
            "",
            "| metric | type | labels | what it says |",
            "|---|---|---|---|",
        ]
        lines += [_row(one) for one in definitions if service in one.owners]
    return "\n".join([*lines, ""])


def _row(one: Definition) -> str:
    labels = ", ".join(f"`{label}`" for label in one.labels)
    return f"| `{one.name}` | {one.kind} | {labels} | {one.text.replace('|', '/')} |"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, "metrics", table(), "does not list the metrics as they are"))
