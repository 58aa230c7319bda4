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
    """Each metric once, under the services that own it."""
    definitions = Metrics().definitions
    owners = [*((service,) for service in SERVICES), *(one.owners for one in definitions if len(one.owners) > 1)]
    lines: list[str] = []
    for group in dict.fromkeys(owners):
        title = " and ".join(group) if len(group) < len(SERVICES) else "all services"
        lines += ["", f"## {title.capitalize()}", "", "| metric | what it says |", "|---|---|"]
        lines += [_row(one) for one in definitions if one.owners == group]
    return "\n".join([*lines, ""])


def _row(one: Definition) -> str:
    labels = f"{{{','.join(one.labels)}}}" if one.labels else ""
    kind = "*Histogram.* " if one.kind == "histogram" else ""
    return f"| `{one.name}{labels}` | {kind}{one.text.replace('|', '/')} |"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, "metrics", table(), "does not list the metrics as they are"))
