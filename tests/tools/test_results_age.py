"""tools/results_age.py: a page of results says whether what it describes has changed since it was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from results_age import checked, declared

from tests.programs import output

BENCH = 'BENCH = Bench("speed", __doc__, measures=("code", "other.py"))\n'
PAGE = """# speed

`python -m bench.speed --model tiny` at {commit}

How fast it is.
"""


class Clone:
    """A small repository with a bench, what it measures, and a page."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.page = root / "docs" / "speed.md"
        self.page.parent.mkdir()
        self.git("init", "-q")
        self.commit("lab/bench/room/speed.py", BENCH)
        self.commit("code/a.py", "one")
        self.measured = self.commit("other.py", "one")
        self.page.write_text(PAGE.format(commit=self.measured))

    def git(self, *arguments: str) -> str:
        who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
        return output("git", "-C", self.root, *who, *arguments).strip()

    def commit(self, name: str, text: str) -> str:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        self.git("add", "-A")
        self.git("commit", "-qm", name)
        return self.git("rev-parse", "--short", "HEAD")

    def wrong(self, *, write: bool = False) -> list[str]:
        return checked(self.root, self.page.parent, write=write)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_a_page_says_what_was_touched_since(clone: Clone) -> None:
    """As new as its code it says nothing; then it is wrong until it is written again, and counts each commit once. What
    is not measured does not count."""
    assert clone.wrong() == []
    clone.commit("elsewhere.py", "one")
    assert clone.wrong() == []
    clone.commit("code/a.py", "two")
    last = clone.commit("other.py", "two")
    clone.commit("elsewhere.py", "two")
    assert clone.wrong() == ["speed.md"]
    clone.wrong(write=True)
    assert clone.wrong() == []
    assert f"**2 commits older** than its code ({last}).\n" in clone.page.read_text()


def test_later_commits_leave_it_true(clone: Clone) -> None:
    """A page that says how old it was at a commit is still right after the next one."""
    clone.commit("code/a.py", "two")
    clone.wrong(write=True)
    clone.commit("code/a.py", "three")
    clone.commit("other.py", "two")
    assert clone.wrong() == []
    assert "**1 commit older**" in clone.page.read_text()


@pytest.mark.parametrize(("said", "instead"), [("**1 ", "**7 "), ("its code (", "its code (abcdef"), ("**1 ", "**")])
def test_what_is_not_so_is_found(clone: Clone, said: str, instead: str) -> None:
    """A wrong count, a commit that there is not, and a sentence that says no count."""
    clone.commit("code/a.py", "two")
    clone.wrong(write=True)
    clone.page.write_text(clone.page.read_text().replace(said, instead))
    assert clone.wrong() == ["speed.md"]


def test_a_page_that_is_new_says_nothing(clone: Clone) -> None:
    """Also not in words that no one wrote by the tool."""
    clone.page.write_text(clone.page.read_text().replace("\n\nHow", "\nAs good as new.\n\nHow"))
    assert clone.wrong() == ["speed.md"]
    clone.wrong(write=True)
    assert clone.wrong() == []


def test_a_renamed_path_is_followed_by_the_bench(clone: Clone) -> None:
    """What counts is the path that the bench declares today, from the renaming on."""
    clone.git("mv", "code", "renamed")
    clone.commit("lab/bench/room/speed.py", BENCH.replace('"code"', '"renamed"'))
    assert declared(clone.root / "lab" / "bench") == {"speed": ("renamed", "other.py")}
    assert clone.wrong() == ["speed.md"]
    clone.commit("renamed/a.py", "two")
    clone.wrong(write=True)
    assert "**2 commits older**" in clone.page.read_text()


def test_sections_have_their_own_age(clone: Clone) -> None:
    """Each section of a page says how old it is by its own commit; a title over sections needs no command of its own,
    a section does."""
    last = clone.commit("code/a.py", "two")
    sections = [
        f"## {name}\n\n`python -m lab.bench.speed` at {at}\n\nText.\n"
        for name, at in (("old", clone.measured), ("new", last))
    ]
    clone.page.write_text("\n".join(["# speed\n\nHow fast it is.\n", *sections]))
    assert clone.wrong() == ["speed.md"]
    clone.wrong(write=True)
    assert clone.wrong() == []
    told = f"at {clone.measured}\n**1 commit older** than its code ({last}).\n\nText."
    assert clone.page.read_text() == "\n".join(["# speed\n\nHow fast it is.\n", *sections]).replace(
        f"at {clone.measured}\n\nText.", told
    )
    clone.page.write_text(clone.page.read_text() + "\n## third\n\nText.\n")
    with pytest.raises(ValueError, match="of a bench that there is"):
        clone.wrong()


@pytest.mark.parametrize("said", ["`python -m bench.speed --model tiny`", "speed --model"])
def test_a_page_without_a_bench_is_refused(clone: Clone, said: str) -> None:
    """A page must have the command of a bench that there is; those by hand need none."""
    clone.page.with_name("log.md").write_text("# Log\n")
    assert clone.wrong() == []
    clone.page.write_text(clone.page.read_text().replace(said, "gone --model"))
    with pytest.raises(ValueError, match="of a bench that there is"):
        clone.wrong()
