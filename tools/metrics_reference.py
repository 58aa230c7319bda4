"""The tables of docs/metrics.md, made from the metrics that the services register.

python tools/metrics_reference.py            write them
python tools/metrics_reference.py --check    exit status 1 if they are not what the registries say
"""

from __future__ import annotations

import sys
from pathlib import Path

from moot.metrics import SERVICES, Definition, Metrics

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
BEGIN, END = "<!-- metrics: begin (tools/metrics_reference.py) -->", "<!-- metrics: end -->"


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
    return "\n".join([BEGIN, *lines, "", END])


def _row(one: Definition) -> str:
    labels = ", ".join(f"`{label}`" for label in one.labels)
    return f"| `{one.name}` | {one.kind} | {labels} | {one.text.replace('|', '/')} |"


def main() -> int:
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    made = before + table() + after
    if "--check" in sys.argv[1:]:
        if made != page:
            print("docs/metrics.md does not list the metrics as they are: make docs", file=sys.stderr)
        return int(made != page)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
