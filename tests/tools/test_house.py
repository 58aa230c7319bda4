"""The check of the house rule: names the one thing that is wrong in a small tree, nothing once that is mended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from house_rule.figures import figures, folder_map
from house_rule.rules import MAX_LINES, MAX_MODULES, MAX_PAGE_BYTES, RULES, SMALL_LINES, contracts_hold
from house_rule.tables import CONTRACTS, ROOMS, ROUTER_ROOMS, Contract
from house_rule.tree import ROOTS, Tree, importers, read

from tests.programs import run

COMMAND = Path(__file__).parents[2] / "tools" / "house.py"
LONG = "".join(f"VALUE_{line} = {line}\n" for line in range(SMALL_LINES))
"""A module that is not small."""
RUN = f'{LONG}if __name__ == "__main__":\n    print()\n'
"""One that is run."""
CLI = "from moot.core.votes import VALUE_1\nfrom moot.core.weights import VALUE_2\n"
VOTES, WEIGHTS, NOISE = (f"moot/core/{name}.py" for name in ("votes", "weights", "noise"))
HOUSE = {
    "pyproject.toml": '[project]\nscripts.moot = "moot.cli:main"\n',
    "docs/architecture.md": "# Parts\n\n<!-- map: begin (made) -->\n<!-- map: end -->\n",
    "moot/__init__.py": '"""The whole."""\n',
    "moot/cli.py": CLI,
    "moot/core/__init__.py": '"""The algorithms."""\n',
    VOTES: LONG,
    WEIGHTS: LONG,
}
"""Files of a tree that keeps the rule."""

Build = Callable[..., Tree]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Writes HOUSE and the given files (None: not there), and reads the tree. The house that runs is out of sight."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ROOTS]:
        monkeypatch.delitem(sys.modules, name)

    def write(files: Mapping[str, str | None], standing: Mapping[str, str] | None = None) -> Tree:
        write_files(tmp_path, files)
        return read(tmp_path, standing or {})

    return write


def write_files(root: Path, files: Mapping[str, str | None]) -> None:
    for name, text in {**HOUSE, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(text)


def found(tree: Tree) -> list[str]:
    return [str(violation) for rule in RULES.values() for violation in rule(tree)]


def only(tree: Tree, *parts: str) -> None:
    """There is one violation, and it says all of `parts`."""
    (line,) = found(tree)
    for part in parts:
        assert part in line


def test_a_tree_that_keeps_the_rule_has_no_violation(build: Build) -> None:
    assert found(build({})) == []


def test_1_a_folder_holds_at_most_twelve_modules(build: Build) -> None:
    """`__init__` and `__main__` are none of them."""
    more = {f"moot/core/part_{number}.py": LONG for number in range(MAX_MODULES - 2)}
    uses = CLI + "".join(f"from moot.core import part_{number}\n" for number in range(MAX_MODULES - 1))
    full = {**more, "moot/cli.py": uses, "moot/core/__main__.py": ""}
    only(build({**full, f"moot/core/part_{MAX_MODULES - 2}.py": LONG}), "rule 1: moot/core: holds 13 modules")
    assert found(build({**full, f"moot/core/part_{MAX_MODULES - 2}.py": None})) == []


def test_1_a_folder_of_commands_may_hold_more(build: Build) -> None:
    names = [f"command_{number}" for number in range(MAX_MODULES + 1)]
    cli = f'{CLI}COMMANDS = {names}\nload = lambda name: __import__(f"moot.commands.{{name}}")\n'
    files = {f"moot/commands/{name}.py": "" for name in names}
    assert found(build({**files, "moot/cli.py": cli, "moot/commands/__init__.py": '"""Subcommands."""'})) == []


@pytest.mark.parametrize(
    ("init", "says"),
    [
        ("", "has no docstring"),
        ('"""The algorithms. They know no clock."""', "starts with 2 sentences"),
        ('"""The algorithms (`votes`, e.g. of drafters).\nThey know no clock"""', "starts with 2 sentences"),
        ('"""One of `votes.` and `weights.`\n\nThey know no clock. Nor a wire."""', None),
        ('"""The algorithms, e.g. votes\nof drafters.\n\nThey know no clock."""', None),
    ],
)
def test_1_every_folder_says_in_one_sentence_what_it_is(build: Build, init: str, says: str | None) -> None:
    tree = build({"moot/core/__init__.py": init})
    if says is None:
        assert found(tree) == []
    else:
        only(tree, "rule 1: moot/core/__init__.py", says)


def test_1_every_folder_has_an_init(build: Build) -> None:
    lines = found(build({"moot/model/rows.py": LONG}))
    assert [line for line in lines if line.startswith("rule 1: moot/model: has no __init__.py")]
    files = {
        "moot/model/__init__.py": '"""Models."""',
        "moot/cli.py": f"{CLI}import moot.model.rows\n",
    }
    assert found(build(files)) == []


def test_2_a_module_has_at_most_five_hundred_lines(build: Build) -> None:
    line = "pass\n"
    only(build({VOTES: line * (MAX_LINES + 1)}), "rule 2: moot/core/votes.py: 501 lines")
    assert found(build({VOTES: line * MAX_LINES})) == []


def test_2_what_is_small_and_for_one_module_alone_is_a_part_of_that(build: Build) -> None:
    small = {VOTES: "VALUE_1 = 1\n"}
    only(build(small), "rule 2: moot/core/votes.py: 1 lines for moot.cli alone")
    second = {WEIGHTS: f"from moot.core.votes import VALUE_1\n{LONG}"}
    assert found(build({**small, **second})) == []


def test_2_a_package_that_passes_a_name_on_is_no_importer_and_those_behind_it_are(build: Build) -> None:
    passed_on = {
        "moot/core/__init__.py": '"""The algorithms."""\nfrom moot.core.votes import VALUE_1\n__all__ = ["VALUE_1"]\n',
        VOTES: "VALUE_1 = 1\n",
        "moot/cli.py": "from moot.core import VALUE_1\nfrom moot.core.weights import VALUE_2\n",
    }
    tree = build(passed_on)
    assert importers(tree)["moot.core.votes"] == {"moot.cli"}
    only(tree, "rule 2: moot/core/votes.py: 1 lines for moot.cli alone")
    uses = f"{passed_on['moot/core/__init__.py']}MORE = VALUE_1 + 1\n"
    tree = build({**passed_on, "moot/core/__init__.py": uses})
    assert importers(tree)["moot.core.votes"] == {"moot.cli", "moot.core"}
    assert found(tree) == []


def test_2_what_nobody_imports_is_not_there_for_anything(build: Build) -> None:
    only(build({NOISE: LONG}), "rule 2: moot/core/noise.py: nobody imports it")
    assert found(build({NOISE: RUN})) == []


@pytest.mark.parametrize(
    "loads", ['NAME = "moot.core.noise"', 'NAME = "moot.core.noise:Kind"', 'NAME, LOAD = "noise", f"moot.core.{0}"']
)
def test_2_what_is_loaded_by_its_name_has_a_use(build: Build, loads: str) -> None:
    assert found(build({NOISE: "", "moot/cli.py": f"{CLI}{loads}\n"})) == []


def test_2_an_entry_point_has_a_use(build: Build) -> None:
    project = '[project.entry-points."moot.drafters"]\nself = "contrib.layers:KIND"\n'
    files = {"contrib/__init__.py": '"""More kinds."""', "contrib/layers.py": ""}
    only(build(files), "rule 2: contrib/layers.py: nobody imports it")
    assert found(build({**files, "pyproject.toml": HOUSE["pyproject.toml"] + project})) == []


def test_2_public_fakes_are_used_outside(build: Build) -> None:
    files = {"moot/testing/__init__.py": '"""Fakes."""', "moot/testing/scripted_verifier.py": ""}
    assert found(build(files)) == []


@pytest.mark.parametrize("reason", ["plug-in", "keeps out torch", "property test pyproject.toml"])
def test_2_a_small_module_may_stand_for_a_reason(build: Build, reason: str) -> None:
    assert found(build({VOTES: "VALUE_1 = 1\n"}, {"moot.core.votes": reason})) == []


@pytest.mark.parametrize(
    ("name", "reason", "says"),
    [
        ("moot.core.votes", "it is nice", "'it is nice' is no reason"),
        ("moot.core.votes", "keeps out ", "'keeps out ' is no reason"),
        ("moot.core.votes", "property test tests/test_votes.py", "there is no tests/test_votes.py"),
    ],
)
def test_2_what_is_no_reason_is_none(build: Build, name: str, reason: str, says: str) -> None:
    only(build({VOTES: "VALUE_1 = 1\n"}, {name: reason}), "rule 2: SMALL_BUT_STANDING", name, says)


def test_2_a_reason_goes_with_what_it_was_for(build: Build) -> None:
    only(build({}, {"moot.core.gone": "plug-in"}), "SMALL_BUT_STANDING['moot.core.gone']", "no such module")
    only(build({}, {"moot.core.votes": "plug-in"}), "SMALL_BUT_STANDING['moot.core.votes']", "no longer small")


@pytest.mark.parametrize(
    "back",
    [
        "from moot.core.weights import VALUE_2",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from moot.core.weights import VALUE_2",
        "def late() -> None:\n    from moot.core import weights",
    ],
)
def test_3_imports_are_no_circle(build: Build, back: str) -> None:
    there = {WEIGHTS: f"from moot.core.votes import VALUE_1\n{LONG}"}
    circle = "rule 3: moot.core.votes: moot.core.votes -> moot.core.weights -> moot.core.votes"
    only(build({**there, VOTES: f"{LONG}{back}\n"}), circle)
    assert found(build({**there, VOTES: LONG})) == []


def test_3_of_several_circles_among_modules_one_is_shown(build: Build) -> None:
    """Two that share a module are one knot, and the shortest way round is named."""
    files = {
        NOISE: f"import moot.core.votes\n{LONG}",
        VOTES: f"import moot.core.noise\nimport moot.core.weights\n{LONG}",
        WEIGHTS: f"import moot.core.votes\n{LONG}",
    }
    only(build(files), "moot.core.noise -> moot.core.votes -> moot.core.noise (one of several among 3 modules)")


def test_4_names_of_modules_stand_once_in_what_serves(build: Build) -> None:
    run = f'{LONG}if __name__ == "__main__":\n    print()\n'
    init = {f"{folder}/__init__.py": '"""Another root."""' for folder in ("services", "lab")}
    only(build({**init, "services/votes.py": RUN}), "rule 4: moot/core/votes.py: a module votes is also in services/")
    others = {"services/votes.py": None, "services/config.py": RUN, "moot/config.py": RUN, "lab/votes.py": run}
    assert found(build({**init, **others})) == []


def test_4_names_of_public_classes_stand_once(build: Build) -> None:
    def both(name: str) -> Tree:
        text = f"{LONG}class {name}:\n    pass\n"
        return build({VOTES: text, WEIGHTS: text})

    only(both("Vote"), "rule 4: moot/core/votes.py: a class Vote is also in moot/core/weights.py")
    assert found(both("_Vote")) == []


def router(room: str, imports: str) -> dict[str, str | None]:
    """A router of four rooms with one module each, all of them run; that of `room` imports what it is told."""
    files: dict[str, str | None] = {"services/__init__.py": '"""Services."""'}
    files["services/router/__init__.py"] = '"""A router."""'
    for name in ("generation", "api", "peers", "store"):
        files[f"services/router/{name}/__init__.py"] = f'"""The room {name}."""'
        uses = f"import {imports}\n" if name == room else ""
        files[f"services/router/{name}/{name}_part.py"] = f'{uses}if __name__ == "__main__":\n    print()\n'
    return files


@pytest.mark.parametrize("target", ["api", "peers", "store"])
@pytest.mark.parametrize("source", ["generation", "api", "peers", "store"])
def test_5_the_rooms_of_the_router_know_generation_at_most(build: Build, source: str, target: str) -> None:
    if source != target:
        imported = f"services.router.{target}.{target}_part"
        only(build(router(source, imported)), f"rule 5: services.router.{source}.{source}_part: imports {imported}")
        assert found(build(router(source, "services.router.generation"))) == []


def test_5_what_a_start_proves_is_asked_by_the_backend_only(build: Build) -> None:
    model = {
        "moot/model/__init__.py": '"""Models."""',
        "moot/model/checks/__init__.py": '"""What a start proves."""',
        "moot/model/checks/selfcheck.py": LONG,
        "moot/model/backend.py": f"from moot.model.checks.selfcheck import VALUE_1\n{LONG}",
    }
    cli = f"{CLI}import moot.model.backend\n"
    assert found(build({**model, "moot/cli.py": cli})) == []
    only(
        build({**model, "moot/cli.py": f"{cli}import moot.model.checks.selfcheck\n"}),
        "rule 5: moot.cli: imports moot.model.checks.selfcheck: only moot.model.backend may",
    )


def test_5_the_workshop_is_used_by_commands_only(build: Build) -> None:
    lab = {
        "lab/__init__.py": '"""The workshop."""',
        "lab/fit.py": LONG,
        "moot/commands/__init__.py": '"""Subcommands."""',
        "moot/commands/train.py": "import lab.fit\n",
    }
    cli = f'{CLI}LOADS = "moot.commands.train"\n'
    assert found(build({**lab, "moot/cli.py": cli})) == []
    only(build({**lab, "moot/cli.py": f"{cli}import lab.fit\n"}), "rule 5: moot.cli: imports lab.fit")


def test_5_a_misspelled_room_keeps_no_contract(build: Build) -> None:
    (line,) = map(str, contracts_hold(build({}), [Contract(("services.router.peer",), sources=ROUTER_ROOMS[:1])]))
    assert line.startswith("rule 5: services.router.peer: ")
    assert {name for contract in CONTRACTS for name in contract.names} == ROOMS


def test_5_rooms_of_the_router_are_built_together(build: Build) -> None:
    """Else one that is named otherwise than its contracts would be free of them."""
    files = router("", "")
    renamed = {name.replace("/peers/", "/links/"): text for name, text in files.items()}
    only(build(renamed), "rule 5: services.router.peers: is missing")


OPTIONS = """
from dataclasses import dataclass
from moot.config import option

@dataclass(frozen=True)
class VoteOptions:
    quorum: float = option(0.5, help="share of the drafters that suffices")

    def __post_init__(self):
        if not 0 < self.quorum <= 1:
            raise ValueError("quorum")
"""


IMPORTS = "from moot.config import option, option_of\nfrom moot.config import option as setting\n"


def options(second: str) -> dict[str, str | None]:
    """Two modules, the second with what is stated again; both import nothing of each other."""
    return {
        "moot/config.py": LONG,
        VOTES: f"{LONG}{OPTIONS}",
        WEIGHTS: f"{IMPORTS}{LONG}{second}\n",
    }


HELP = "the help text 'share of the drafters that suffices' also stands in WeightOptions"
DEFAULT = "the default quorum = 0.5 also stands in WeightOptions"
BOUND = "the bound 0 < self.quorum <= 1 also stands in WeightOptions"
CHECKED = 'quorum: float = option(0.6, help="when to go on")\n    def {}(self):\n        assert 0 < self.quorum <= 1'


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ('width: int = option(2, help="share of the drafters " "that suffices")', HELP),
        ('width: int = setting(2, help="share of the drafters that suffices")', HELP),
        ('quorum: float = option_of(VoteOptions, "quorum", help="share of the drafters that suffices")', HELP),
        ('quorum: float = option(0.5, help="when to go on")', DEFAULT),
        ("quorum: float = 0.5", DEFAULT),
        ('quorum: float = option_of(VoteOptions, "quorum", default=0.5)', DEFAULT),
        ('share: float = option(POLICY.quorum, help="when to go on")', "restates quorum of another dataclass"),
        (CHECKED.format("__post_init__"), BOUND),
        (CHECKED.format("check_together"), BOUND),
    ],
)
def test_6_help_default_and_bound_of_an_option_stand_once(build: Build, second: str, says: str) -> None:
    record = f"@dataclass(frozen=True)\nclass WeightOptions:\n    {second}\n"
    only(build(options(record)), "rule 6: moot/core/", says)


def test_6_a_constant_is_where_the_default_of_several_options_stands(build: Build) -> None:
    second = '@dataclass(frozen=True)\nclass WeightOptions:\n    quorum: float = option(QUORUM, help="when to go on")\n'
    files = options(second)
    files[VOTES] = str(files[VOTES]).replace("option(0.5", "option(QUORUM")
    assert found(build(files)) == []


@pytest.mark.parametrize(
    "second",
    [
        'class WeightOptions:\n    width: int = option(2, help="proposals of a drafter")',
        'class WeightOptions:\n    quorum: float = option(0.6, help="when to go on")',
        "class WeightOptions:\n    votes: VoteOptions\n    quorum: float = 0.5",
        'class WeightOptions(VoteOptions):\n    quorum: float = option(0.5, help="when to go on")',
        'class WeightOptions:\n    votes: str = option(KINDS, help="all of them")',
        'class WeightOptions:\n    quorum: float = option_of(VoteOptions, "quorum")',
        'class WeightOptions:\n    quorum: float = option_of(VoteOptions, "quorum", default=0.6, help="as above")',
    ],
)
def test_6_what_is_nested_inherited_or_differs_is_not_stated_twice(build: Build, second: str) -> None:
    assert found(build(options(f"@dataclass(frozen=True)\n{second}\n"))) == []


def test_6_measurements_state_their_own_conditions(build: Build) -> None:
    """A figure was made with them, whatever the defaults of the product become."""
    second = "@dataclass(frozen=True)\nclass WeightOptions:\n    quorum: float = 0.5\n"
    files = options(second)
    assert len(found(build(files))) == 1
    files["lab/bench/weights.py"] = files.pop(WEIGHTS)
    files |= {"lab/__init__.py": '"""Lab."""\n', "lab/bench/__init__.py": '"""Bench."""\n'}
    assert not [one for one in found(build(files)) if one.startswith("rule 6")]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/decisions/0001-one.md"])
def test_7_pages_by_hand_are_short(build: Build, page: str) -> None:
    only(build({page: "x" * (MAX_PAGE_BYTES + 1)}), f"rule 7: {page}: 12.0 kB by hand")
    assert found(build({page: "x" * MAX_PAGE_BYTES})) == []


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("docs/results/load.md", "{}"),
        ("docs/load.md", "<!-- made by bench/load.py -->\n{}"),
        ("docs/load.md", "# Load\n<!-- result load -->\n{}\n<!-- end -->\n"),
        ("docs/load.md", "# Load\n<!-- load: begin (bench/load.py) -->\n{}\n<!-- load: end -->\n"),
    ],
)
def test_7_what_is_made_may_be_long(build: Build, page: str, text: str) -> None:
    assert found(build({page: text.format("x" * (MAX_PAGE_BYTES + 1))})) == []


def test_the_map_has_a_line_for_each_folder(tmp_path: Path) -> None:
    """The first sentence of each, below its parent's; what protoc makes and the rooms of the benches are left out."""
    write_files(tmp_path, {"lab/__init__.py": '"""Measurements\nof anyone.\n\nMore."""', "moot/v1/__init__.py": ""})
    write_files(tmp_path, {f"lab/bench/{room}__init__.py": '"""Benches."""' for room in ("", "router/")})
    lines = folder_map(tmp_path).split("\n")
    assert lines[1:-1] == [
        "- `lab/`: Measurements of anyone.",
        "  - `bench/`: Benches.",
        "- `moot/`: The whole.",
        "  - `core/`: The algorithms.",
    ]


def test_the_figures_tell_what_serves_from_the_workshop(build: Build) -> None:
    rows = dict(
        line.split("  ", 1)
        for line in figures(build({"lab/bench/load.py": "pass\n" * 7, "tests/a.py": "pass\n"})).splitlines()
    )
    told = {name: value.strip() for name, value in rows.items()}
    assert told["modules"] == "4"
    assert told["fullest folder"] == "moot/core (2)"
    assert told["lines of what serves"] == str(2 * SMALL_LINES + 4)
    assert told["lines of the workshop"] == told["of these in bench"] == "7"
    assert told["lines of tests"] == "1"


def house(root: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, COMMAND, "--root", root, *flags)


def test_the_command_writes_the_map_and_says_by_its_status_whether_the_rule_is_kept(tmp_path: Path) -> None:
    write_files(tmp_path, {})
    without_map = house(tmp_path, "--check")
    assert (without_map.returncode, without_map.stdout) == (1, "")
    assert "docs/architecture.md does not map the folders: make docs" in without_map.stderr
    assert house(tmp_path, "--write").returncode == 0
    assert "  - `core/`: The algorithms.\n" in (tmp_path / "docs" / "architecture.md").read_text()
    kept = house(tmp_path, "--check")
    assert (kept.returncode, kept.stdout, kept.stderr) == (0, "", "")
    write_files(tmp_path, {NOISE: LONG, "README.md": "x" * (MAX_PAGE_BYTES + 1)})
    house(tmp_path, "--write")
    broken = house(tmp_path, "--check")
    assert broken.returncode == 1
    first, last = broken.stdout.splitlines()
    assert first.startswith("rule 2: moot/core/noise.py: nobody imports it")
    assert last.startswith("rule 7: README.md"), "every rule is asked, from the first to the last"
