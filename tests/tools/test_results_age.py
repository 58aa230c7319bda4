"""tools/results_age.py: a page of results says whether what it describes has changed since it was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from results_age import checked, declared

from tests.programs import output

BENCH = 'BENCH = Bench("speed", __doc__, measures=("code", "other.py"))\n'
PAGE = """<!-- made by python -m bench.speed --model tiny at {commit}; measures {paths} -->
<!-- age -->
<!-- end -->

# speed
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
        self.page.write_text(PAGE.format(commit=self.measured, paths="code other.py"))

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
    """As new as its code it says nothing; then it is wrong until it is written again, and counts by path. What is not
    measured does not count."""
    assert clone.wrong() == []
    clone.commit("elsewhere.py", "one")
    assert clone.wrong() == []
    clone.commit("code/a.py", "two")
    last = clone.commit("code/b.py", "one")
    assert clone.wrong() == ["speed.md"]
    clone.wrong(write=True)
    assert clone.wrong() == []
    assert f"2 commits touched `code` since (the last: {last})" in clone.page.read_text()
    assert "other.py` since" not in clone.page.read_text()


def test_later_commits_leave_it_true_and_other_paths_do_not(clone: Clone) -> None:
    """A page that says how old it was up to a commit is still right after the next one, unless that touches a path
    which the page takes for unchanged."""
    clone.commit("code/a.py", "two")
    clone.wrong(write=True)
    clone.commit("code/a.py", "three")
    assert clone.wrong() == []
    clone.commit("other.py", "two")
    assert clone.wrong() == ["speed.md"]


@pytest.mark.parametrize(
    ("said", "instead"), [("1 commit touched", "7 commits touched"), ("(the last: ", "(the last: abcdef")]
)
def test_what_is_not_so_is_found(clone: Clone, said: str, instead: str) -> None:
    """A wrong count, and a commit that there is not."""
    clone.commit("code/a.py", "two")
    clone.wrong(write=True)
    clone.page.write_text(clone.page.read_text().replace(said, instead))
    assert clone.wrong() == ["speed.md"]


def test_a_renamed_path_is_followed_by_the_bench(clone: Clone) -> None:
    """The page names the old path, the bench the new one: both count."""
    clone.git("mv", "code", "renamed")
    clone.commit("lab/bench/room/speed.py", BENCH.replace('"code"', '"renamed"'))
    assert declared(clone.root / "lab" / "bench") == {"speed": ("renamed", "other.py")}
    clone.wrong(write=True)
    clone.commit("renamed/a.py", "two")
    clone.wrong(write=True)
    text = clone.page.read_text()
    assert "1 commit touched `code` since" in text
    assert "2 commits touched `renamed` since" in text


def test_a_page_without_a_place_is_refused(clone: Clone) -> None:
    """A page of a bench must have its age marks."""
    clone.page.write_text(clone.page.read_text().replace("<!-- age -->", ""))
    with pytest.raises(ValueError, match="place for its age"):
        clone.wrong()
