"""Grafana's dashboards, made of the modules in this folder.

python tools/dashboards            write deploy/grafana/dashboards
python tools/dashboards --check    exit status 1 if the files are not what the modules say
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fleet
import overview
import speculation
from panels import dashboard_json

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards"


def main() -> int:
    made = {
        FOLDER / f"{module.__name__}.json": json.dumps(dashboard_json(module.DASHBOARD), indent=1) + "\n"
        for module in (overview, speculation, fleet)
    }
    if "--check" in sys.argv[1:]:
        wrong = [path.name for path, text in made.items() if not path.exists() or path.read_text() != text]
        wrong += [path.name for path in FOLDER.glob("*.json") if path not in made]
        if wrong:
            print(f"{', '.join(wrong)} in {FOLDER.name}/ not as tools/dashboards says: make docs", file=sys.stderr)
        return int(bool(wrong))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in made.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
