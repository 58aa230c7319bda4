"""Parts of documents that are made by a program: written, or compared with what is there."""

from __future__ import annotations

import sys
from pathlib import Path


def filled(text: str, mark: str, made: str) -> str:
    """`text` with `made` between `<!-- MARK: begin (...) -->` and `<!-- MARK: end -->`. Raises ValueError without a
    place."""
    before, opening, rest = text.partition(f"<!-- {mark}: begin")
    note, arrow, rest = rest.partition("-->")
    _, closing, after = rest.partition(f"<!-- {mark}: end -->")
    if not closing:
        raise ValueError(f"no place for {mark}")
    return f"{before}{opening}{note}{arrow}\n{made}\n{closing}{after}"


def write_or_check(page: Path, mark: str, made: str, says: str) -> int:
    """Fill the place of `mark` in `page`; with --check only look.

    `says`: what is wrong when it is not there already. Returns the exit status. Raises ValueError without a place.
    """
    text = page.read_text()
    wanted = filled(text, mark, made)
    if "--check" in sys.argv[1:]:
        if wanted != text:
            print(f"docs/{page.name} {says}: make docs", file=sys.stderr)
        return int(wanted != text)
    page.write_text(wanted)
    return 0
