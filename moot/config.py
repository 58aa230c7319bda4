"""One frozen config per program, from flags, environment and YAML, in that order of precedence.

A config is a frozen, keyword-only dataclass with options, its own and those of the parts that it nests
(moot.core.options). Option `max_model_len` is the flag `--max-model-len`, the environment variable
`MOOT_MAX_MODEL_LEN` and the YAML key `max_model_len`, however deep the part that declares it is nested. Unknown keys
and flags are errors that name them.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from moot.core.errors import ConfigError
from moot.core.options import Option, check_value, flat_options, make_config, option

__all__ = ["flag_of", "load_config", "option", "parse_value", "variable_of"]

ConfigT = TypeVar("ConfigT")


def load_config(
    cls: type[ConfigT],
    argv: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    *,
    prog: str = "moot",
    description: str = "",
    example: str = "",
) -> ConfigT:
    """Build `cls` from `argv`, `environ` (default: the process's) and the YAML file named by `--config`.

    Raises ConfigError naming the key for unknown keys, values of the wrong type and missing required fields.
    `--help` prints and exits 0; a usage error exits 2, as argparse does.
    """
    environ = os.environ if environ is None else environ
    parser = _parser(cls, prog, description, example)
    flags = {key: value for key, value in vars(parser.parse_args(list(argv))).items() if value is not None}
    path = flags.pop("config", None) or environ.get("MOOT_CONFIG")
    from_file = _read_yaml(Path(path)) if path else {}
    known = {leaf.name: leaf for leaf in flat_options(cls)}
    if unknown := sorted(set(from_file) - set(known)):
        raise ConfigError(f"unknown key in {path}: {', '.join(unknown)}")
    values: dict[str, Any] = {}
    for name, leaf in known.items():
        variable = variable_of(name)
        for source, raw in (
            (flag_of(name), flags.get(name)),
            (variable, environ.get(variable)),
            (f"{name} in {path}", from_file.get(name)),
        ):
            if raw is not None:
                values[name] = parse_value(raw, leaf.hint, source, leaf.option)
                break
        else:
            if leaf.default is dataclasses.MISSING:
                raise ConfigError(f"{flag_of(name)} (or {variable}) is required")
    return make_config(cls, **values)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    return "MOOT_" + name.upper()


def _parser(cls: type[Any], prog: str, description: str, example: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=f"example:\n  {example}" if example else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", help="YAML file with the same keys (underscores)")
    # What is the program's own comes first.
    for leaf in sorted(flat_options(cls), key=lambda leaf: leaf.is_inherited):
        shown = "required" if leaf.default is dataclasses.MISSING else f"default: {leaf.default}"
        told = leaf.option
        text = f"{told.help} ({'; '.join(filter(None, (shown, told.bound)))})".replace("%", "%%")
        if told.choices:
            text += f" [{', '.join(told.choices)}]"
        bare = {"nargs": "?", "const": "true"} if leaf.hint is bool else {}
        parser.add_argument(flag_of(leaf.name), dest=leaf.name, help=text, metavar="VALUE", **typing.cast(Any, bare))
    return parser


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read config file {path}: {error}") from error
    if not isinstance(loaded, dict | None):
        raise ConfigError(f"config file {path} must be a mapping of keys to values")
    return loaded or {}


def _parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise ValueError("not true or false")
    return text.lower() in ("true", "1", "yes")


def _parse_float(text: str) -> float:
    """A finite number. NaN, which no comparison refuses, and infinity are refused: there are no endless waits."""
    if not math.isfinite(value := float(text)):
        raise ValueError("not finite")
    return value


_SCALARS: dict[type, Callable[[str], Any]] = {bool: _parse_bool, int: int, float: _parse_float, str: str, Path: Path}


def parse_value(raw: Any, hint: Any, source: str, option: Option | None = None) -> Any:
    """`raw` (text, or what YAML made of it) as `hint`: bool, int, float, str, Path, T | None, tuple[T, ...].

    Raises ConfigError naming `source` where it is not one, or `option` does not allow it.
    """
    value = _parsed(raw, hint, source)
    if option is not None:
        check_value(source, option, value)
    return value


def _parsed(raw: Any, hint: Any, source: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (inner,) = [arg for arg in args if arg is not type(None)]
        return None if raw in ("", "none") else _parsed(raw, inner, source)
    if origin is tuple:
        parts = raw if isinstance(raw, list) else [part.strip() for part in str(raw).split(",") if part.strip()]
        return tuple(_parsed(part, args[0], source) for part in parts)
    try:
        return _SCALARS[hint](str(raw))
    except ValueError as error:
        raise ConfigError(f"{source}: {raw!r} is not a valid {hint.__name__}") from error
