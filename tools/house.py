"""The check of the house rule (CONTRIBUTING.md), and the map of folders in docs/architecture.md.

python tools/house.py            the figures of this checkout
python tools/house.py --check    exit status 1 and a line for each place that does not keep the rule
python tools/house.py --write    write the map
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from generated import write_or_check
from house_rule.figures import figures, folder_map
from house_rule.rules import RULES
from house_rule.tables import SMALL_BUT_STANDING
from house_rule.tree import Tree, read

ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description="The check of the house rule; without a flag: the figures.")
    parser.add_argument("--check", action="store_true", help="print what does not keep the rule; exit status 1 if any")
    parser.add_argument("--write", action="store_true", help="write the map in docs/architecture.md")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout; it has no exceptions by name")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    tree = read(root, SMALL_BUT_STANDING if root == ROOT else {})
    if arguments.write or arguments.check:
        stale = write_or_check(root / "docs" / "architecture.md", "map", folder_map(root), "does not map the folders")
        return max(stale, check(tree)) if arguments.check else stale
    print(figures(tree))
    return 0


def check(tree: Tree) -> int:
    found = [violation for rule in RULES.values() for violation in rule(tree)]
    for violation in found:
        print(violation)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
