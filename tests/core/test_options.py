"""An option stands once, in the part that uses it, however it is nested; and what its bound excludes is never made."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, replace

import pytest

from moot.core.errors import ConfigError
from moot.core.options import Options, flat_options, make_config, option, option_of, part, value_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait(Options):
    soft_s: float = option(1.0, flag="soft_deadline_s", help="seconds until a part suffices", minimum=0)
    hard_s: float = option(2.0, help="seconds at most", above=0)
    share: float = option(0.5, help="what suffices", minimum=0, maximum=1)
    lost: float = option(0.0, help="what is gone", minimum=0, below=1)
    notes: int = 0

    def check_together(self) -> None:
        if self.soft_s > self.hard_s:
            raise ConfigError("soft_deadline_s must not be above hard_s")


@dataclass(frozen=True, kw_only=True)
class Listener(Options):
    host: str = option("localhost", help="address")
    port: int = option(help="port", minimum=0)


@dataclass(frozen=True, kw_only=True)
class Link(Options):
    wait: Wait = part(Wait, hard_s=3.0)
    kinds: tuple[str, ...] = option(("a",), help="which", choices=("a", "b"))
    sizes: tuple[int, ...] = option((), help="how many", minimum=1)


@dataclass(frozen=True, kw_only=True)
class Program(Options):
    name: str = option(help="what it is called")
    listener: Listener = part(Listener, port=80)
    link: Link = part(Link)
    limit: int | None = option(None, help="at most", minimum=1)


def test_options_of_nested_parts_are_flat() -> None:
    """Each has its own name or the one that it declares; a nesting may change the default and nothing else."""
    found = {
        leaf.name: (leaf.path, leaf.default) for leaf in flat_options(Program) if leaf.name not in ("name", "kinds")
    }
    assert found == {
        "host": (("listener", "host"), "localhost"),
        "port": (("listener", "port"), 80),
        "soft_deadline_s": (("link", "wait", "soft_s"), 1.0),
        "hard_s": (("link", "wait", "hard_s"), 3.0),
        "share": (("link", "wait", "share"), 0.5),
        "lost": (("link", "wait", "lost"), 0.0),
        "sizes": (("link", "sizes"), ()),
        "limit": (("limit",), None),
    }


def test_values_reach_the_part_that_declares_them() -> None:
    """What is not given stays as the nesting says, also beside what is given."""
    made = make_config(Program, name="p", soft_deadline_s=2.5, port=1, sizes=(3,))
    assert made == Program(
        name="p", listener=Listener(port=1), link=Link(wait=Wait(soft_s=2.5, hard_s=3.0), sizes=(3,))
    )
    assert {leaf.name: value_at(made, leaf) for leaf in flat_options(Program)} == {
        "name": "p", "host": "localhost", "port": 1, "soft_deadline_s": 2.5, "hard_s": 3.0, "share": 0.5, "lost": 0.0,
        "kinds": ("a",), "sizes": (3,), "limit": None,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["soft_s", "notes", "link", "prot"])
def test_only_options_are_set_by_name(name: str) -> None:
    """Neither a field that has another flat name, nor one without a flag, nor a part, nor what there is not."""
    with pytest.raises(TypeError, match=f"Program has no option {name}"):
        make_config(Program, name="p", **{name: 1})


@pytest.mark.parametrize(
    ("good", "bad", "says"),
    [
        ({"soft_deadline_s": 0}, {"soft_deadline_s": -1e-9}, "soft_deadline_s must be at least 0"),
        ({"hard_s": 1.1}, {"hard_s": 0.0}, "hard_s must be above 0"),
        ({"share": 0.0}, {"share": -0.01}, "share must be 0 to 1"),
        ({"share": 1}, {"share": 1.01}, "share must be 0 to 1"),
        ({"lost": 0.99}, {"lost": 1.0}, "lost must be at least 0 and below 1"),
        ({"sizes": (1, 2)}, {"sizes": (1, 0)}, "sizes must be at least 1"),
        ({"limit": None}, {"limit": 0}, "limit must be at least 1"),
        ({"port": 0}, {"port": -1}, "port must be at least 0"),
        ({"kinds": ("a", "b")}, {"kinds": ("a", "c")}, "kinds: 'c' is not one of a, b"),
        ({"hard_s": 1e300}, {"hard_s": float("inf")}, "hard_s must be above 0"),
        ({"share": 0.5}, {"share": float("nan")}, "share must be 0 to 1"),
    ],
)
def test_bounds_hold_at_their_edges(good: dict[str, object], bad: dict[str, object], says: str) -> None:
    """What is allowed is made, and the next value is not: by its flat name, wherever it is nested."""
    made = make_config(Program, name="p", **good)
    assert {leaf.name: value_at(made, leaf) for leaf in flat_options(Program)}.items() >= good.items()
    with pytest.raises(ConfigError, match=f"^{says}$"):
        make_config(Program, name="p", **bad)


def test_a_part_is_never_made_with_what_its_options_exclude() -> None:
    """By nobody: not by itself, not as a copy, not by a subclass with options of its own."""
    with pytest.raises(ConfigError, match="share"):
        Wait(share=2)
    with pytest.raises(ConfigError, match="soft_deadline_s must not be above hard_s"):
        replace(Wait(), soft_s=9.0)
    with pytest.raises(FrozenInstanceError):
        Wait().share = 2.0  # type: ignore[misc]

    @dataclass(frozen=True, kw_only=True)
    class LongWait(Wait):
        share: float = option_of(Wait, "share", default=1.0)
        tries: int = option(1, help="how often", minimum=1)

    assert LongWait().share == 1.0
    for bad in ({"tries": 0}, {"share": 2.0}, {"soft_s": 9.0}):
        with pytest.raises(ConfigError):
            LongWait(**bad)  # type: ignore[arg-type]  # one keyword at a time


def test_a_flag_is_declared_by_one_part() -> None:
    """Two that differ in anything are a mistake, found when the class is made, not when somebody sets the flag."""

    @dataclass(frozen=True, kw_only=True)
    class Other(Options):
        mine: int = option(3, flag="port", help="port", minimum=0)

    for parts in ({"two": part(Other)}, {"port": option(80, help="another port", minimum=0)}):
        body = {"listener": part(Listener, port=80), **parts, "__annotations__": {}}
        with pytest.raises(TypeError, match=r"Twice: listener and \w+ both declare the option port"):
            type("Twice", (Options,), body)


@dataclass(frozen=True, kw_only=True)
class Retry(Options):
    pause_s: float = option(1.0, help="seconds between tries", above=0)


@dataclass(frozen=True, kw_only=True)
class Reader(Options):
    pause_s: float = option_of(Retry, "pause_s")


@dataclass(frozen=True, kw_only=True)
class Both(Options):
    one: Retry = part(Retry)
    two: Reader = part(Reader)


def test_parts_may_share_one_option() -> None:
    """Taken from where it is declared, it is told once and reaches both."""

    assert [leaf.name for leaf in flat_options(Both)] == ["pause_s"]
    made = make_config(Both, pause_s=4.0)
    assert made.one.pause_s == made.two.pause_s == 4.0


def test_an_option_of_another_part_keeps_what_is_not_said_anew() -> None:
    """Its help text, bound and choices stand where it was declared; its flat name is that of the new field."""

    @dataclass(frozen=True, kw_only=True)
    class Taker(Options):
        wait_s: float = option_of(Wait, "soft_s", default=0.25)
        kinds: tuple[str, ...] = option_of(Link, "kinds", help="which of them")

    wait, kinds = flat_options(Taker)
    assert (wait.name, wait.default, wait.option.help) == ("wait_s", 0.25, "seconds until a part suffices")
    assert (kinds.default, kinds.option.help) == (("a",), "which of them")
    with pytest.raises(ConfigError, match="wait_s must be at least 0"):
        Taker(wait_s=-1.0)
    with pytest.raises(ConfigError, match="is not one of a, b"):
        Taker(kinds=("c",))
