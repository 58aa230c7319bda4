"""The command `moot`: finds the subcommand, runs it, and turns errors into one sentence and an exit status."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence

from moot.core.errors import ConfigError, MootError

# Each is a module of moot.commands with run(argv) -> exit status; loaded only when it is asked for.
COMMANDS = {
    "serve": "start everything on this machine, or one role: serve router|verifier|drafter",
    "chat": "talk to a running server",
    "demo": "start everything, ask it five prompts with and without drafting, compare",
    "drafters": "list the kinds of drafters and the drafters of a running server",
    "prepare": "fetch and convert a model once, so that it loads quickly",
    "replay": "record what drafters propose once, and try votes, weights and trees on it",
    "simulate": "plan sizes that this machine does not have, in simulated time",
    "train": "make training text with a target, and drafters from it",
    "index": "build the datastore of the suffix drafter from texts",
    "bench": "run one of the measurements in lab/bench",
}

WORKSHOP = ("replay", "train", "index", "bench")
"""Commands that use the package lab, which images that serve leave out."""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

EXAMPLE = "example:\n  moot serve --demo"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else EXIT_USAGE
    name, *rest = arguments
    if name not in COMMANDS:
        return _fail(f"unknown command {name} (known: {', '.join(COMMANDS)})", EXIT_USAGE)
    if name in WORKSHOP and importlib.util.find_spec("lab") is None:
        return _fail(f"{name} needs the workshop (the package lab), which what serves does without", EXIT_FAILED)
    try:
        return int(importlib.import_module(f"moot.commands.{name}").run(rest))
    except ConfigError as error:
        return _fail(str(error), EXIT_USAGE)
    except MootError as error:
        return _fail(str(error), EXIT_FAILED)
    except BrokenPipeError:
        return EXIT_FAILED
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED


def usage() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{text}" for name, text in COMMANDS.items()]
    listed = "\n".join(lines)
    return f"usage: moot COMMAND [FLAGS]\n\n{listed}\n\n`moot COMMAND --help` tells more.\n\n{EXAMPLE}"


def _fail(sentence: str, status: int) -> int:
    print(f"moot: {sentence}", file=sys.stderr)
    return status
