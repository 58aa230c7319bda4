"""A bench as it declares itself, and what it leaves: JSON with everything, and the page and the picture made of it."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from moot.config import load_config, option

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "results"
SHORT = {"-k": "--num-speculative-tokens"}
_CELL = re.compile(r"(?P<median>-?[\d,.]*\d)(?: ?%)?(?: \((?P<low>-?[\d,.]+)(?: to |-)(?P<high>-?[\d,.]+)\))?")
COMMANDS = __name__.removesuffix(".harness.pages")
"""The package that the commands are modules of."""
ConfigT = TypeVar("ConfigT", bound="PageConfig")


@dataclass(frozen=True, kw_only=True)
class PageConfig:
    results: Path = option(RESULTS, help="folder of the page, its JSON and its picture")


@dataclass(frozen=True, kw_only=True)
class BenchConfig(PageConfig):
    repetitions: int = option(7, help="turns of every arm that count")


@dataclass(frozen=True, slots=True)
class Table:
    """`labels`: how many cells at the beginning of a row name it."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    labels: int = 1

    def text(self) -> str:
        """As Markdown: columns that say the same in every row stand before it, in one line."""
        same = {place for place in range(self.labels, len(self.header)) if self._is_same(place)}
        told = [f"{self.header[place]} {self.rows[0][place]}" for place in sorted(same)]
        shown = [place for place in range(len(self.header)) if place not in same]
        head, *rows = (
            "| " + " | ".join(str(row[place]) for place in shown) + " |" for row in (self.header, *self.rows)
        )
        lines = [f"In every row: {'; '.join(told)}.", ""] if told else []
        return "\n".join([*lines, head, "|" + "---|" * len(shown), *rows])

    def _is_same(self, place: int) -> bool:
        """Of more than one row."""
        return len(self.rows) > 1 and len({str(row[place]) for row in self.rows}) == 1


@dataclass(frozen=True, slots=True)
class Bench:
    """One measurement: the name of its command, its module's docstring, and the paths whose code it measures."""

    name: str
    about: str | None
    measures: tuple[str, ...]

    def read(self, cls: type[ConfigT], argv: Sequence[str] | None) -> ConfigT:
        """The config of this run. `argv` None: the command line's. Raises ConfigError."""
        given = sys.argv[1:] if argv is None else argv
        flags = [SHORT.get(argument, argument) for argument in given]
        return load_config(cls, flags, prog=f"python -m {COMMANDS}.{self.name}", description=self.about or "")

    def kept(self, config: PageConfig, part: str = "") -> dict[str, Any]:
        """What the last run wrote down as `facts`; nothing without one."""
        path = config.results / f"{self._file(part)}.json"
        found: dict[str, Any] = json.loads(path.read_text())["facts"] if path.exists() else {}
        return found

    def publish(
        self,
        config: PageConfig,
        table: Table,
        facts: Mapping[str, Any],
        picture: str = "",
        *,
        draw: Callable[[Any], None] | None = None,
        part: str = "",
        argv: Sequence[str] | None = None,
    ) -> None:
        """Write JSON, page and picture, and print the page. `picture`: the column that it shows; `draw`: what fills
        its matplotlib Figure instead. `part`: the section of the bench's page, whose others stay."""
        config.results.mkdir(parents=True, exist_ok=True)
        path = config.results / self._file(part)
        result = {
            "name": path.name,
            "part": part,
            "about": (self.about or "").split("\n\n")[0],
            "command": " ".join(
                ["python -m", f"{COMMANDS}.{self.name}", *map(_shown, sys.argv[1:] if argv is None else argv)]
            ),
            "commit": commit(self.measures),
            "measures": self.measures,
            "machine": machine(),
            "header": table.header,
            "rows": [[str(cell) for cell in row] for row in table.rows],
            "labels": table.labels,
            "picture": picture,
            "facts": facts,
        }
        # The page is made of what was written, so that it can hold nothing else.
        path.with_suffix(".json").write_text(text := json.dumps(result, indent=1))
        print(page := page_of(read := json.loads(text), usual(config.results)))
        whole = config.results / f"{self.name}.md"
        former = whole.read_text() if whole.exists() else f"# {self.name}\n\n{read['about']}\n"
        whole.write_text(with_section(former, page))
        if picture:
            from matplotlib.figure import Figure

            figure = Figure(figsize=(9, 5), layout="constrained")
            draw(figure) if draw else draw_column(figure, read)
            figure.savefig(path.with_suffix(".png"), dpi=120)

    def _file(self, part: str) -> str:
        return f"{self.name}_{part}" if part else self.name


def usual(results: Path) -> str:
    """What the pages of a folder need not repeat: its README, which may name a machine; empty without one."""
    readme = results / "README.md"
    return readme.read_text() if readme.exists() else ""


def page_of(result: Mapping[str, Any], readme: str = "") -> str:
    """The page that a result's JSON describes, or of a part its section. It says nothing of a machine that `readme`
    names; tools/results_age.py writes below the command how old it is."""
    machine = where(result["machine"])
    parts = [
        f"## {result['part']}" if result["part"] else f"# {result['name']}",
        f"`{result['command']}` at {result['commit']}",
        # A section says by its table what it is about; the sentence is the whole page's.
        *([result["about"]] if result["about"] and not result["part"] else []),
        *([] if machine in readme else [machine]),
        Table(result["header"], result["rows"], result["labels"]).text(),
    ]
    if result["picture"]:
        parts.append(f"![{result['name']}]({result['name']}.png)")
    return "\n\n".join(parts) + "\n"


def with_section(page: str, section: str) -> str:
    """`page` with `section` in place of the one of the same heading, or at its end. What stands before the first
    section is the one whose heading is the title."""
    sections = {text.partition("\n")[0]: text.strip("\n") for text in re.split(r"^(?=## )", page, flags=re.MULTILINE)}
    sections[section.partition("\n")[0]] = section.strip("\n")
    return "\n\n".join(sections.values()) + "\n"


def where(machine: Mapping[str, Any]) -> str:
    """A machine in one line: of its versions those that decide figures; the JSON has them all."""
    features = "".join(f", {feature}" for feature in machine["cpu_features"][-1:])
    gpu = "no GPU" if machine["gpu"] == "none" else machine["gpu"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "torch", "transformers"))
    return f"{machine['cpu']}{features}, {machine['cores']} cores, {machine['memory_gib']} GiB, {gpu}; {versions}"


def read_cell(cell: str) -> tuple[float, float, float] | None:
    """Median and ends that a cell begins with; without ends around it, a number is its own. None: it begins with no
    number."""
    found = _CELL.match(cell)
    if found is None:
        return None
    median, low, high = (float((found[name] or found["median"]).replace(",", "")) for name in ("median", "low", "high"))
    return (median, low, high) if low <= median <= high else (median, median, median)


def draw_column(figure: Any, result: Mapping[str, Any]) -> None:
    """Into a matplotlib Figure, of a result's JSON. Raises ValueError where the table has no such column."""
    column, labels = result["header"].index(result["picture"]), result["labels"]
    bars = [(", ".join(row[:labels]), found) for row in result["rows"] if (found := read_cell(row[column])) is not None]
    figure.set_size_inches(9, 1.5 + 0.28 * len(bars))
    axes = figure.subplots()
    for name, (median, low, high) in bars:
        axes.barh(name, median, xerr=[[median - low], [high - median]], color="tab:blue", capsize=2)
    axes.invert_yaxis()
    axes.set(xlabel=result["picture"])


def commit(paths: Sequence[str] = ()) -> str:
    """The commit that is checked out, and whether something of `paths` differs from it."""
    try:
        name = _git("rev-parse", "--short", "HEAD")
        return f"{name} with changes" if _git("status", "--porcelain", "--", *paths) else name
    except (OSError, subprocess.CalledProcessError):
        return "no commit"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def machine() -> dict[str, Any]:
    """CPU, cores, memory in GiB, GPU where torch is loaded and has one, and the versions that matter."""
    features: list[str] = []
    try:
        text = Path("/proc/cpuinfo").read_text()
        flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
        features = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
        model = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "")
    except OSError:
        model = platform.processor()
    versions = {}
    for name in ("torch", "transformers", "grpcio", "redis", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    torch = sys.modules.get("torch")
    has_gpu = torch is not None and torch.cuda.is_available()
    return {
        "cpu": model,
        "cpu_features": features,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "gpu": torch.cuda.get_device_name() if torch is not None and has_gpu else "none",
        "python": platform.python_version(),
        **versions,
    }


def _shown(argument: str) -> str:
    """An argument as a reader can use it: of a path only its last part, which says what was taken, not from where.

    Paths may be several, separated by commas.
    """
    return ",".join(Path(part).name if os.sep in part and Path(part).exists() else part for part in argument.split(","))
