"""The drafter of your own in docs/drafters/writing.md works as it is printed; every built-in kind has its page."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from moot.core.errors import ConfigError
from moot.core.types import SamplingParams
from moot.drafters.attached.kinds import load_attached_kind
from moot.drafters.interface import Ask, DrafterOptions
from moot.drafters.registry import BUILT_IN_KINDS, attached_kinds, create, known_kinds, load_kind

PAGES = Path(__file__).parents[2] / "docs" / "drafters"
DOCUMENT = (PAGES / "writing.md").read_text()
PARAMS = SamplingParams(temperature=0.0)


def block(language: str, name: str) -> str:
    """The code block of that language which begins with a comment that names the file."""
    (found,) = [code for code in re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL) if name in code[:60]]
    return found


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example as an installed package; returns a file of phrases."""
    (tmp_path / "moot_phrases.py").write_text(block("python", "moot_phrases.py"))
    groups = tomllib.loads(block("toml", "pyproject.toml"))["project"]["entry-points"]
    info = tmp_path / "moot_phrases-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moot-phrases\nVersion: 1.0\n")
    lines = [
        line for group, names in groups.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in names.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    phrases = tmp_path / "phrases.txt"
    phrases.write_text("10 11 12 13 14\n11 20\n7 500 8\n")
    return phrases


def test_the_example_is_thirty_lines_and_proposes(installed: Path) -> None:
    """Found by its entry point; it proposes the rest of the longest beginning, within K, width and vocabulary."""
    code = block("python", "moot_phrases.py")
    assert len([line for line in code.splitlines() if line and not line.startswith("#")]) <= 30
    assert "phrases" in known_kinds()
    drafter = create("phrases", {"vocab_size": 100, "path": str(installed)})
    assert drafter.family == "phrases"
    session = drafter.open([1, 2, 10, 11], PARAMS)
    asks = [Ask(session, 2, 1), Ask(session, 8, 3), Ask(session, 1, 3)]
    found = [[chain.token_ids for chain in chains] for chains in drafter.propose(asks)]
    assert found == [[(12, 13)], [(12, 13, 14), (20,)], [(12,), (20,)]]
    assert drafter.propose([Ask(session, 2)])[0][0].confidences == (63, 63)
    drafter.extend(session, [7])
    assert drafter.propose([Ask(session, 2)]) == [[]]  # 500 is outside the vocabulary
    drafter.extend(session, [9])
    assert drafter.propose([Ask(session, 2)]) == [[]]
    with pytest.raises(ConfigError, match="needs option path"):
        create("phrases", {"vocab_size": 100})


@pytest.mark.parametrize("kind", [*BUILT_IN_KINDS, *attached_kinds()])
def test_every_built_in_kind_has_its_page(kind: str) -> None:
    """No kind without what it is, when it pays and every option of its own; the overview has it in its table."""
    page = (PAGES / f"{kind}.md").read_text()
    assert page.startswith(f"# `{kind}`: ")
    assert "**Pays" in page
    options = (load_attached_kind if kind in attached_kinds() else load_kind)(kind).options
    own = {field.name for field in dataclasses.fields(options)} - {
        field.name for field in dataclasses.fields(DrafterOptions)
    }
    assert own
    assert [name for name in sorted(own) if f"`{name}`" not in page] == []
    assert f"\n| [`{kind}`]({kind}.md) |" in (PAGES / "README.md").read_text()
