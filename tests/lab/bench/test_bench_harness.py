"""The harness of the benches: arms in turns, columns, pages made of their JSON, prompts, which benches there are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab.bench.harness.arms import Arm, Column, Runs, calls_in_turns, in_turns, table_of
from lab.bench.harness.pages import Bench, PageConfig, Table, page_of, read_cell, where
from lab.bench.harness.prompts import PromptConfig, read_prompts, repeated
from lab.bench.replays.report import Counts
from moot.commands.bench import names
from moot.config import option
from moot.core.errors import ConfigError

BENCH = Bench("example", "What an example measures.\n\nAnd how.", measures=("moot/core", "moot/rpc"))


@dataclass(frozen=True, kw_only=True)
class Config(PageConfig):
    num_speculative_tokens: int = option(8, help="K")


def test_arms_alternate_and_warm_up_is_dropped() -> None:
    """No arm always comes first, each gets what differs for it, and the first turn is not counted."""
    calls: list[str] = []

    def take(arm: Arm) -> float:
        calls.append(arm.name)
        return arm.differs["worth"] + len(calls)

    arms = [Arm("a", {"worth": 100.0}), Arm("b", {"worth": 200.0})]
    found = in_turns(arms, take, 3, warm_up=1, say=lambda _: None)
    assert "".join(calls) == "ab" + "ba" + "ab" + "ba"
    assert found == {"a": [104.0, 105.0, 108.0], "b": [203.0, 206.0, 207.0]}
    calls.clear()
    assert calls_in_turns({"a": lambda: 1, "b": lambda: 2}, 2, warm_up=0, say=calls.append) == {
        "a": [1, 1],
        "b": [2, 2],
    }
    assert len(calls) == 2


def test_what_one_turn_shares_cancels_in_ratios_of_arms() -> None:
    """A turn that is slow for both arms moves no ratio, and a column reads median, interval or ratio as it says."""
    speeds = {"off": (10.0, 1.0, 20.0), "on": (30.0, 3.0, 60.0)}
    runs = Runs({arm: [{"speed": speed} for speed in found] for arm, found in speeds.items()})
    columns = (
        Column("speed", "speed", 1),
        Column("of off", "speed", base="off"),
        Column("median", "speed", 0, is_plain=True),
    )
    table = table_of(runs, "arm", columns)
    assert table.header == ("arm", "speed", "of off", "median")
    assert table.rows[1] == ["on", "30.0 (3.0 to 60.0)", "3.00", "30"]


def published(folder: Path, **more: str) -> tuple[dict[str, Any], str]:
    config = BENCH.read(Config, ["--results", str(folder), "-k", "3"])
    assert config.num_speculative_tokens == 3
    table = Table(("arm", "ms (95 %)", "note"), [("a", "3.0 (2.0 to 4.0)", "ours"), ("b", "", "no time")])
    BENCH.publish(config, table, {"runs": {"a": [2.0, 3.0, 4.0]}}, argv=["--model", str(folder)], **more)
    name = f"example_{more['part']}" if "part" in more else "example"
    result = json.loads((folder / f"{name}.json").read_text())
    return result, (folder / "example.md").read_text()


def test_a_page_is_what_its_json_says(tmp_path: Path) -> None:
    """Page and JSON name command, commit and machine, the JSON also the paths; the page is made of the JSON and has
    every cell of it."""
    result, page = published(tmp_path, picture="ms (95 %)")
    assert page == page_of(result)
    assert f"`python -m lab.bench.example --model {tmp_path.name}`" in page
    assert str(tmp_path.parent) not in page
    title, _, made, *_ = page.splitlines()
    assert title == "# example"
    assert re.fullmatch(r"`python -m lab\.bench\.example .*` at \w+.*", made)
    assert result["measures"] == ["moot/core", "moot/rpc"]
    assert "| a | 3.0 (2.0 to 4.0) | ours |\n| b |  | no time |" in page
    changed = result | {"rows": [["a", "9.0", "theirs"]]}
    assert "| a | 9.0 | theirs |" in page_of(changed)
    assert "ours" not in page_of(changed)
    assert (tmp_path / "example.png").read_bytes().startswith(b"\x89PNG")
    assert BENCH.kept(Config(results=tmp_path)) == {"runs": {"a": [2.0, 3.0, 4.0]}}
    assert BENCH.kept(Config(results=tmp_path), "other") == {}


def test_parts_are_sections_of_one_page(tmp_path: Path) -> None:
    """A part has JSON and picture of its own and a section of the bench's page; measured again it takes the place of
    its own section, and the head that of the head alone."""
    _, first = published(tmp_path, part="first", picture="ms (95 %)")
    assert not (tmp_path / "example_first.md").exists()
    page = tmp_path / "example.md"
    assert page.read_text().startswith(
        "# example\n\nWhat an example measures.\n\n## first\n\n`python -m lab.bench.example "
    )
    assert "![example_first](example_first.png)" in first
    published(tmp_path, part="second")
    page.write_text(page.read_text().replace("| ours |", "| by hand |"))
    published(tmp_path, part="first")
    titles = [line for line in page.read_text().splitlines() if line.startswith("#")]
    assert titles == ["# example", "## first", "## second"]
    assert (
        page.read_text().index("| ours |") < page.read_text().index("## second") < page.read_text().index("| by hand |")
    )
    published(tmp_path)
    assert [line for line in page.read_text().splitlines() if line.startswith("#")] == titles
    assert page.read_text().count("`python -m lab.bench.example ") == 3


def test_a_machine_that_the_readme_names_is_not_repeated(tmp_path: Path) -> None:
    """Pages beside a README with their machine leave it out; those of another machine say so."""
    result, page = published(tmp_path)
    here = where(result["machine"])
    assert here in page.splitlines()
    (tmp_path / "README.md").write_text(f"# Results\n\nA page names a machine other than this: {here}.\n")
    assert here not in published(tmp_path)[1]
    (tmp_path / "README.md").write_text("# Results\n\nAnother machine.\n")
    assert here in published(tmp_path)[1].splitlines()


def test_what_all_rows_say_is_said_once() -> None:
    """A column that never differs stands before the table; the columns that name a row stay, as does a single row."""
    table = Table(("arm", "K", "ms", "identical", "bound"), [("a", 4, 1, "yes", 2), ("b", 4, 3, "yes", 2)], labels=2)
    assert table.text().splitlines() == [
        *("In every row: identical yes; bound 2.", ""),
        *("| arm | K | ms |", "|---|---|---|", "| a | 4 | 1 |", "| b | 4 | 3 |"),
    ]
    assert "In every row" not in Table(table.header, table.rows[:1]).text()


def test_a_page_without_a_picture_shows_none_and_unknown_columns_are_refused(tmp_path: Path) -> None:
    """A picture is of a column that there is."""
    _, page = published(tmp_path)
    assert "![" not in page
    assert not (tmp_path / "example.png").exists()
    with pytest.raises(ValueError, match="not in"):
        published(tmp_path, picture="none of these")


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        ("1,234.5 (1,000.0 to 2,000.0)", (1234.5, 1000.0, 2000.0)),
        ("0.95 (0.89 to 0.97) reached", (0.95, 0.89, 0.97)),
        ("-386 (-746 to -74)", (-386.0, -746.0, -74.0)),
        ("98.7 (87.4-110.0)", (98.7, 87.4, 110.0)),
        ("2.377 (-0.186 to -0.111)", (2.377, 2.377, 2.377)),
        ("96.9 %", (96.9, 96.9, 96.9)),
        ("K = 4", None),
        ("", None),
    ],
)
def test_pictures_read_cells_as_tables_write_them(cell: str, found: tuple[float, ...] | None) -> None:
    """Median and ends, or the number alone; differences beside a value are no interval of it."""
    assert read_cell(cell) == found


def lines(count: int) -> str:
    asked = [{"question_id": n, "category": "ab"[n % 2], "turns": [f"text {n}"]} for n in range(1, count)]
    return "\n".join(map(json.dumps, asked))


def test_only_questions_that_nothing_was_chosen_on(tmp_path: Path) -> None:
    """With --held-out only ids ending in 7 are asked, and a file is needed; few are asked again."""
    path = tmp_path / "questions.jsonl"
    path.write_text(lines(40))
    config = PromptConfig(prompts=path, held_out=True)
    assert list(read_prompts(config, 3).values()) == ["text 7", "text 17", "text 27"]
    everything = PromptConfig(prompts=path)
    assert {name[-1] for name in read_prompts(everything, 2, over_categories=True)} == {"a", "b"}
    assert repeated({"x": "one", "y": "two"}, 3) == {"x#0": "one", "y#1": "two", "x#2": "one"}
    with pytest.raises(ConfigError, match="--prompts"):
        read_prompts(PromptConfig(held_out=True), 3)


def test_every_bench_has_the_name_of_its_command() -> None:
    """What declares itself a bench is found by `moot bench`, under the name that its page and `python -m` have, and has
    paths that there are."""
    found = names()
    assert {"router_round", "router_scaling", "load", "ablation", "end_to_end", "peers", "verify_time"} <= set(found)
    assert {"branch_time", "divergence", "misbehaving", "overload", "node_budget"} <= set(found)
    assert {"length_sweep", "replay_votes", "replay_kinds", "simulate", "gpu_check"} <= set(found)
    root = Path(__file__).parents[3]
    told = subprocess.run(
        [sys.executable, "-c", PROBE, *found], cwd=root, check=True, capture_output=True, text=True, timeout=120
    ).stdout
    benches = json.loads(told)
    assert [name for name, _ in benches] == found
    for name, paths in benches:
        assert paths, name
        assert all((root / path).exists() for path in paths), name


PROBE = """
import importlib, importlib.util, json, sys
found = []
for name in sys.argv[1:]:
    is_package = importlib.util.find_spec(f"lab.bench.{name}").submodule_search_locations is not None
    bench = importlib.import_module(f"lab.bench.{name}.__main__" if is_package else f"lab.bench.{name}").BENCH
    found.append((bench.name, bench.measures))
print(json.dumps(found))
"""


def test_counts_of_texts_differ_text_by_text() -> None:
    """A text that is worth much moves both sides of a difference: its interval is that of the gain alone."""
    few, more = Counts([10, 10, 10], [5, 50, 0]), Counts([10, 10, 10], [7, 52, 2])
    assert few.length == pytest.approx(1 + 55 / 30)
    assert few.beside(few) == f"{few.length:.3f}"
    assert more.beside(few) == f"{more.length:.3f} (+0.200 to +0.200)"
    low, high = few.interval()
    assert high - low > 2
