"""Options: what a part can be told. The default, the bound and the help text of each stand in the part's dataclass.

A part is a frozen dataclass that inherits from `Options`. `option(...)` makes a field of it one that flags, environment
and YAML can set (moot.config reads them); `part(...)` nests a part in a larger one, and leaves its names flat.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast, final

from moot.core.errors import ConfigError

PartT = TypeVar("PartT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The option that stands with a field: help text, choices, bound. `minimum` and `maximum` are allowed themselves,
    `above` and `below` are not."""

    help: str
    choices: tuple[str, ...] = ()
    flag: str | None = None
    """Its flat name, where that is not the field's."""
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None

    @property
    def bound(self) -> str:
        """The bound as `--help` and errors tell it; empty where there is none."""
        if self.minimum is not None and self.maximum is not None:
            return f"{self.minimum} to {self.maximum}"
        words = {"at least": self.minimum, "above": self.above, "at most": self.maximum, "below": self.below}
        return " and ".join(f"{word} {limit}" for word, limit in words.items() if limit is not None)

    def allows(self, value: float) -> bool:
        """Whether the value is finite and within the bound."""
        return (
            math.isfinite(value)
            and (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
        )


def option(
    default: Any = MISSING,
    *,
    help: str,
    choices: Sequence[str] | None = None,
    flag: str | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    repr: bool = True,
) -> Any:
    """A field that can be set. `help` says what it means, with its unit; a bound of a tuple is one of each element."""
    told = Option(
        help=help,
        choices=tuple(choices or ()),
        flag=flag,
        minimum=minimum,
        above=above,
        maximum=maximum,
        below=below,
    )
    return field(default=default, repr=repr, metadata={Option: told})


def option_of(cls: type[Any], name: str, *, default: Any = MISSING, **changes: Any) -> Any:
    """A field that is the option `name` of another dataclass again, but for its default and what else is given of what
    `option` takes: its help text, a bound."""
    like = cls.__dataclass_fields__[name]
    told = replace(like.metadata[Option], **{"flag": None, **changes})
    return field(default=like.default if default is MISSING else default, repr=like.repr, metadata={Option: told})


@dataclass(frozen=True, slots=True)
class Part:
    """The mark of a field that nests a part. `defaults`: by field of the part, where they are not its own."""

    cls: type[Any]
    defaults: Mapping[str, Any]


def part(cls: type[PartT], **defaults: Any) -> PartT:
    """A field that nests a part; without values it is made with `defaults`, and else the part's own."""
    metadata = {Part: Part(cls, defaults)}
    is_whole = all(
        one.name in defaults or one.default is not MISSING or one.default_factory is not MISSING
        for one in dataclasses.fields(cast(Any, cls))
    )
    made = field(default_factory=partial(cls, **defaults), metadata=metadata) if is_whole else field(metadata=metadata)
    return cast(PartT, made)


class Options:
    """Base class of parts: an object whose values are out of bounds is never made."""

    __slots__ = ()

    def __init_subclass__(cls, **words: Any) -> None:
        """Raises TypeError for a flat name that two fields have, those of nested parts included, unless both are one
        option, taken by `option_of` from the same dataclass."""
        super().__init_subclass__(**words)
        inherited = {name: one for base in reversed(cls.__mro__[1:]) for name, one in _fields_of(base).items()}
        # The class is not a dataclass yet: its own fields are attributes of it.
        own = {name: one for name, one in vars(cls).items() if isinstance(one, dataclasses.Field)}
        found: dict[str, tuple[Option, Any, str]] = {}
        for name, one in {**inherited, **own}.items():
            for flat, told, default in _flat(name, one, {}):
                told = replace(told, flag=None)
                if (told, default) != found.setdefault(flat, (told, default, name))[:2]:
                    raise TypeError(f"{cls.__name__}: {found[flat][2]} and {name} both declare the option {flat}")

    @final
    def __post_init__(self) -> None:
        """Raises ConfigError naming the option that has a wrong value, or what `check_together` says."""
        check_options(self)
        self.check_together()

    def check_together(self) -> None:
        """Raises ConfigError for values that cannot work together."""


def check_options(made: Any) -> None:
    """Raises ConfigError naming the first option of a dataclass whose value is none of its choices or out of bounds."""
    for one in dataclasses.fields(made):
        if told := one.metadata.get(Option):
            check_value(told.flag or one.name, told, getattr(made, one.name))


def check_value(source: str, told: Option, value: Any) -> None:
    """Raises ConfigError naming `source`, from which the value came, if the option does not allow it."""
    for one in value if isinstance(value, tuple) else (value,):
        if one is None or isinstance(one, bool):
            continue
        if told.choices and one not in told.choices:
            raise ConfigError(f"{source}: {one!r} is not one of {', '.join(told.choices)}")
        if isinstance(one, int | float) and not told.allows(one):
            raise ConfigError(f"{source} must be {told.bound or 'finite'}")


@dataclass(frozen=True, slots=True)
class FlatOption:
    """One option of a dataclass or of a part that it nests, at whatever depth."""

    name: str
    """Its flat name: the YAML key, and with other letters the flag and the environment variable."""
    path: tuple[str, ...]
    """The fields that lead to it, the last is its own."""
    option: Option
    default: Any
    """MISSING: it must be given."""
    hint: Any
    is_inherited: bool


def flat_options(cls: type[Any]) -> list[FlatOption]:
    """All options of a dataclass, in order. One that several parts share stands once."""
    return list({leaf.name: leaf for leaf in reversed(list(_flat_options(cls, (), {})))}.values())[::-1]


def _flat_options(cls: type[Any], path: tuple[str, ...], defaults: Mapping[str, Any]) -> Iterator[FlatOption]:
    hints = typing.get_type_hints(cls)
    inherited = {name for base in cls.__mro__[1:] for name in _fields_of(base)}
    inherited -= set(vars(cls).get("__annotations__", ()))
    for one in dataclasses.fields(cls):
        here = (*path, one.name)
        if nested := one.metadata.get(Part):
            yield from _flat_options(nested.cls, here, nested.defaults)
        elif told := one.metadata.get(Option):
            default = defaults.get(one.name, one.default)
            is_inherited = not path and one.name in inherited
            yield FlatOption(told.flag or one.name, here, told, default, hints[one.name], is_inherited)


def make_config(cls: type[PartT], **values: Any) -> PartT:
    """An object with `values` by their flat names, and defaults else.

    Raises ConfigError for values that are not allowed and TypeError for a name that is no option of it.
    """
    used: set[str] = set()
    made = _made(cls, values, {}, used)
    if unknown := sorted(set(values) - used):
        raise TypeError(f"{cls.__name__} has no option {', '.join(unknown)}")
    return cast(PartT, made)


def value_at(made: Any, leaf: FlatOption) -> Any:
    """The option's value in an object of the dataclass that `leaf` is one of."""
    for name in leaf.path:
        made = getattr(made, name)
    return made


def _made(cls: type[Any], values: Mapping[str, Any], defaults: Mapping[str, Any], used: set[str]) -> Any:
    """An object of the dataclass, its parts included; adds to `used` the names that it knows."""
    given = dict(defaults)
    for one in dataclasses.fields(cls):
        if nested := one.metadata.get(Part):
            given[one.name] = _made(nested.cls, values, nested.defaults, used)
        elif (told := one.metadata.get(Option)) and (flat := told.flag or one.name) in values:
            used.add(flat)
            given[one.name] = values[flat]
    made = cls(**given)
    if not isinstance(made, Options):
        check_options(made)
    return made


def _fields_of(cls: type[Any]) -> Mapping[str, dataclasses.Field[Any]]:
    return cast("Mapping[str, dataclasses.Field[Any]]", vars(cls).get("__dataclass_fields__", {}))


def _flat(name: str, one: dataclasses.Field[Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, Option, Any]]:
    """Flat name and default of a field's option, or of all options of the part that it nests."""
    if nested := one.metadata.get(Part):
        for inner, other in nested.cls.__dataclass_fields__.items():
            yield from _flat(inner, other, nested.defaults)
    elif told := one.metadata.get(Option):
        yield told.flag or name, told, defaults.get(name, one.default)
