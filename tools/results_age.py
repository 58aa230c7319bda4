"""Whether the pages of docs/results are older than what they describe: said on each page, between its age marks.

python tools/results_age.py            write it
python tools/results_age.py --check    exit status 1 if a page does not say it, or says what is not so

A page's first line has the commit that was measured and the paths that it measures. Paths count that stand there or
that the bench declares today (`BENCH = Bench(..., measures=...)`), so that a path that was renamed is followed. A page
that says that it is old names the last commit that it counts: later ones make it no less true.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
_FIRST = re.compile(
    r"<!-- made by python -m (?:lab\.)?bench\.(?P<bench>\w+).* at (?P<commit>[0-9a-f]{7,40})\b.*;"
    r" measures (?P<paths>.*) -->\n"
)
_AGE = re.compile(r"(?P<begin><!-- age -->\n)(?P<text>.*?)(?P<end><!-- end -->)", re.DOTALL)
_TOLD = re.compile(r"(?P<count>\d+) commits? touched `(?P<path>[^`]+)` since \(the last: (?P<last>[0-9a-f]+)\)")


def declared(folder: Path) -> dict[str, tuple[str, ...]]:
    """What every bench under `folder` says that it measures, by the bench's name."""
    return dict(_declarations(folder))


def _declarations(folder: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    for path in sorted(folder.glob("*/*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BENCH":
                assert isinstance(node.value, ast.Call)
                measures = next(keyword.value for keyword in node.value.keywords if keyword.arg == "measures")
                yield ast.literal_eval(node.value.args[0]), tuple(ast.literal_eval(measures))


class History:
    """The commits of one clone."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def touched(self, path: str, since: str, until: str = "HEAD") -> list[str]:
        """Short names of the commits after `since` that touched `path`, the latest first. Raises CalledProcessError for
        commits that are not here."""
        command = ["git", "-C", str(self._root), "log", "--format=%h", f"{since}..{until}", "--", path]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    def age(self, commit: str, paths: Iterable[str]) -> str:
        """A sentence; empty for a page that is as new as what it describes."""
        told = []
        for path in paths:
            if names := self.touched(path, commit):
                count = len(self.touched(path, commit, names[0]))
                told.append(f"{count} commit{'s' * (count > 1)} touched `{path}` since (the last: {names[0]})")
        return f"**Older than what it describes**: {'; '.join(told)}.\n" if told else ""

    def is_so(self, text: str, commit: str, paths: Iterable[str]) -> bool:
        """Whether a page says all that is old, and only what is so up to the commits that it names."""
        told = {found["path"]: (int(found["count"]), found["last"]) for found in _TOLD.finditer(text)}
        try:
            counts = {path: len(self.touched(path, commit, last)) for path, (_, last) in told.items()}
        except subprocess.CalledProcessError:
            return False
        is_true = all(counts[path] == count > 0 for path, (count, _) in told.items())
        return is_true and all(path in told for path in paths if self.touched(path, commit))


def parts(page: str, benches: Mapping[str, Sequence[str]]) -> tuple[str, list[str], re.Match[str]]:
    """Commit, paths and age of a page. Raises ValueError for a page without first line or marks."""
    first, age = _FIRST.match(page), _AGE.search(page)
    if first is None or age is None:
        raise ValueError("no first line of a bench, or no place for its age")
    return first["commit"], list(dict.fromkeys([*first["paths"].split(), *benches.get(first["bench"], ())])), age


def checked(root: Path, results: Path, *, write: bool) -> list[str]:
    """Names of the pages that are, or were, wrong. Raises CalledProcessError where the history is not here."""
    history, benches = History(root), declared(root / "lab" / "bench")
    wrong = []
    for path in sorted(results.glob("*.md")):
        if not (page := path.read_text()).startswith("<!-- made by"):
            continue
        commit, paths, age = parts(page, benches)
        if write:
            path.write_text(page[: age.start("text")] + history.age(commit, paths) + page[age.end("text") :])
        if not history.is_so(age["text"], commit, paths):
            wrong.append(path.name)
    return wrong


def main(argv: Sequence[str]) -> int:
    is_check = "--check" in argv
    try:
        wrong = checked(ROOT, RESULTS, write=not is_check)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"docs/results: not looked at, as the history is not here ({error})", file=sys.stderr)
        return 0
    if is_check and wrong:
        print(f"docs/results: {', '.join(wrong)}: say how old they are by make docs", file=sys.stderr)
    return int(is_check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
