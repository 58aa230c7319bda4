"""One default, three sources, and errors that name the key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from moot.config import flag_of, load_config, option
from moot.core.errors import ConfigError
from moot.core.options import Options, part


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    model: str = option(help="model folder")
    port: int = option(8000, help="TCP port")
    ratio: float = option(0.5, help="0 to 1")
    verbose: bool = option(False, help="more logs")
    peers: tuple[str, ...] = option((), help="addresses")
    limit: int | None = option(None, help="tokens, none for no limit")
    mode: str = option("degrade", help="what to do", choices=("degrade", "required"))
    folder: Path | None = option(None, help="a folder")


def test_flags_go_before_environment_before_file(tmp_path: Path) -> None:
    """A flag beats MOOT_<FLAG>, which beats the YAML key, which beats the default."""
    file = tmp_path / "moot.yaml"
    file.write_text("model: from-file\nport: 1\nratio: 0.25\npeers: [a:1, b:2]\n")
    environ = {"MOOT_PORT": "2", "MOOT_RATIO": "0.75", "MOOT_CONFIG": str(file)}
    config = load_config(Example, ["--port", "3", "--verbose"], environ)
    assert config == Example(model="from-file", port=3, ratio=0.75, verbose=True, peers=("a:1", "b:2"))


def test_values_are_parsed_to_their_types() -> None:
    """Optional, tuple, bool and Path fields have a written form."""
    argv = ["--model", "m", "--peers", "a:1, b:2", "--limit", "none", "--verbose", "false", "--folder", "/x"]
    config = load_config(Example, argv, {})
    assert config == Example(model="m", peers=("a:1", "b:2"), limit=None, verbose=False, folder=Path("/x"))


def test_unknown_flags_exit_2_and_help_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """Usage errors have exit status 2; --help tells every flag with its default and an example."""
    with pytest.raises(SystemExit) as usage:
        load_config(Example, ["--modle", "m"], {})
    assert usage.value.code == 2
    with pytest.raises(SystemExit) as helped:
        load_config(Example, ["--help"], {}, example="moot serve verifier --model m")
    assert helped.value.code == 0
    shown = capsys.readouterr().out
    assert "moot serve verifier --model m" in shown
    assert all(flag_of(name) in shown for name in ("model", "port", "limit"))
    assert "default: 8000" in shown


@dataclass(frozen=True, kw_only=True)
class Shared:
    burst: int = option(1, help="a flag of every program")


@dataclass(frozen=True, kw_only=True)
class Own(Shared):
    model: str = option(help="a flag of this program")


def test_help_tells_a_programs_own_flags_before_those_that_all_have(capsys: pytest.CaptureFixture[str]) -> None:
    """Flags that programs share stand after what a reader came for."""
    with pytest.raises(SystemExit):
        load_config(Own, ["--help"], {})
    shown = capsys.readouterr().out
    assert shown.index("a flag of this program") < shown.index("a flag of every program")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines(Options):
    soft_ms: float = option(50.0, flag="vote_soft_deadline_ms", help="milliseconds until few suffice", minimum=0)
    quorum: float = option(0.5, help="how many suffice", minimum=0, maximum=1)


@dataclass(frozen=True, kw_only=True)
class Listener(Options):
    port: int = option(help="TCP port", minimum=0)
    mode: str = option("degrade", help="what to do", choices=("degrade", "required"))


@dataclass(frozen=True, kw_only=True)
class Nesting(Options):
    model: str = option(help="model folder")
    deadlines: Deadlines = part(Deadlines)
    listener: Listener = part(Listener, port=7100)


def test_options_of_parts_come_from_flags_environment_and_file(tmp_path: Path) -> None:
    """All three know them by their flat names, in the same order of precedence, at once."""
    file = tmp_path / "moot.yaml"
    file.write_text("model: from-file\nvote_soft_deadline_ms: 10\nquorum: 0.25\nport: 1\n")
    environ = {"MOOT_VOTE_SOFT_DEADLINE_MS": "20", "MOOT_QUORUM": "1", "MOOT_CONFIG": str(file)}
    config = load_config(Nesting, ["--vote-soft-deadline-ms", "30"], environ)
    assert config == Nesting(
        model="from-file", deadlines=Deadlines(soft_ms=30.0, quorum=1.0), listener=Listener(port=1)
    )
    assert load_config(Nesting, ["--model", "m"], {}) == Nesting(model="m", listener=Listener(port=7100))


@pytest.mark.parametrize(
    ("kind", "argv", "environ", "yaml", "says"),
    [
        (Example, "--port x", {}, "", "--port"),
        (Example, "", {"MOOT_VERBOSE": "perhaps"}, "", "MOOT_VERBOSE"),
        (Example, "--mode other", {}, "", "degrade, required"),
        (Example, "", {}, "prot: 1\n", "prot"),
        (Example, "", {}, "- a\n", "mapping"),
        (Example, "", {}, "limit: many\n", "limit"),
        (Example, "--ratio nan", {}, "", "--ratio"),
        (Example, "", {"MOOT_RATIO": "inf"}, "", "MOOT_RATIO"),
        (Example, "", {}, "ratio: .nan\n", "ratio"),
        (Nesting, "--quorum 1.01", {}, "", "^--quorum must be 0 to 1$"),
        (Nesting, "", {"MOOT_QUORUM": "-0.01"}, "", "^MOOT_QUORUM must be 0 to 1$"),
        (Nesting, "", {}, "quorum: 2\n", "^quorum in .*moot.yaml must be 0 to 1$"),
        (Nesting, "--vote-soft-deadline-ms -1", {}, "", "^--vote-soft-deadline-ms must be at least 0$"),
        (Nesting, "--port -1", {}, "", "^--port must be at least 0$"),
        (Nesting, "", {"MOOT_MODE": "other"}, "", "^MOOT_MODE: 'other' is not one of degrade, required$"),
        (Nesting, "", {}, "soft_ms: 1\n", "unknown key in .*moot.yaml: soft_ms$"),
        (Nesting, "", {}, "deadlines: {quorum: 1}\n", "unknown key in .*moot.yaml: deadlines$"),
    ],
)
def test_a_wrong_key_or_value_is_named_where_it_was_given(
    kind: type[Example | Nesting], argv: str, environ: dict[str, str], yaml: str, says: str, tmp_path: Path
) -> None:
    """The flag, the variable or the key of the file; the names of parts are none of them."""
    if yaml:
        file = tmp_path / "moot.yaml"
        file.write_text(yaml)
        environ = {**environ, "MOOT_CONFIG": str(file)}
    with pytest.raises(ConfigError, match=says):
        load_config(kind, ["--model", "m", *argv.split()], environ)


def test_a_missing_value_is_named() -> None:
    """What has no default and was given nowhere."""
    with pytest.raises(ConfigError, match="--model"):
        load_config(Example, [], {})


def test_help_shows_the_options_of_parts_with_default_and_bound(capsys: pytest.CaptureFixture[str]) -> None:
    """Each once, by its flag."""
    with pytest.raises(SystemExit):
        load_config(Nesting, ["--help"], {})
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("--vote-soft-deadline-ms VALUE milliseconds until few suffice (default: 50.0; at least 0)") == 1
    assert "--quorum VALUE how many suffice (default: 0.5; 0 to 1)" in shown
    assert "--port VALUE TCP port (default: 7100; at least 0)" in shown
    assert "--soft-ms" not in shown
