"""One frozen config per program, from flags, environment and YAML, in that order of precedence.

A config is a frozen, keyword-only dataclass whose fields have metadata from `option(...)`. Field `max_model_len`
is the flag `--max-model-len`, the environment variable `MOOT_MAX_MODEL_LEN` and the YAML key `max_model_len`;
its default stands in the dataclass and nowhere else. Unknown keys and flags are errors that name them.
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

ConfigT = TypeVar("ConfigT")


def option(default: Any = dataclasses.MISSING, *, help: str, choices: Sequence[str] | None = None) -> Any:
    """A config field. `help` says what it means, with its unit. Tuples are given comma-separated."""
    metadata = {"help": help, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


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
    hints = typing.get_type_hints(cls)
    names = {field.name: field for field in dataclasses.fields(typing.cast(Any, cls))}
    if unknown := sorted(set(from_file) - set(names)):
        raise ConfigError(f"unknown key in {path}: {', '.join(unknown)}")
    values: dict[str, Any] = {}
    for name, field in names.items():
        variable = variable_of(name)
        for source, raw in (
            (flag_of(name), flags.get(name)),
            (variable, environ.get(variable)),
            (f"{name} in {path}", from_file.get(name)),
        ):
            if raw is not None:
                values[name] = parse_value(raw, hints[name], source, field.metadata.get("choices"))
                break
        else:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise ConfigError(f"{flag_of(name)} (or {variable}) is required")
    return cls(**values)


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
    inherited = {f.name for base in cls.__mro__[1:] if dataclasses.is_dataclass(base) for f in dataclasses.fields(base)}
    # What is the program's own comes first.
    for field in sorted(dataclasses.fields(cls), key=lambda field: field.name in inherited):
        shown = "required" if field.default is dataclasses.MISSING else f"default: {field.default}"
        text = f"{field.metadata.get('help', '')} ({shown})".replace("%", "%%")
        if choices := field.metadata.get("choices"):
            text += f" [{', '.join(choices)}]"
        bare = {"nargs": "?", "const": "true"} if typing.get_type_hints(cls)[field.name] is bool else {}
        parser.add_argument(flag_of(field.name), dest=field.name, help=text, metavar="VALUE", **typing.cast(Any, bare))
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
    """No option means NaN, which no comparison refuses, or infinity: there are no endless waits."""
    if not math.isfinite(value := float(text)):
        raise ValueError("not finite")
    return value


_SCALARS: dict[type, Callable[[str], Any]] = {bool: _parse_bool, int: int, float: _parse_float, str: str, Path: Path}


def parse_value(raw: Any, hint: Any, source: str, choices: Sequence[str] | None = None) -> Any:
    """`raw` (text, or what YAML made of it) as `hint`: bool, int, float, str, Path, T | None, tuple[T, ...]."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (inner,) = [arg for arg in args if arg is not type(None)]
        return None if raw in ("", "none") else parse_value(raw, inner, source, choices)
    if origin is tuple:
        parts = raw if isinstance(raw, list) else [part.strip() for part in str(raw).split(",") if part.strip()]
        return tuple(parse_value(part, args[0], source, choices) for part in parts)
    try:
        value = _SCALARS[hint](str(raw))
    except ValueError as error:
        raise ConfigError(f"{source}: {raw!r} is not a valid {hint.__name__}") from error
    if choices and value not in choices:
        raise ConfigError(f"{source}: {raw!r} is not one of {', '.join(choices)}")
    return value
