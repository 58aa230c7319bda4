"""Builds the drafters that come with the package or the repository, with the recipes that they were made by.

python tools/build_drafters.py --prompts question.jsonl                all of them, each where it lies
python tools/build_drafters.py --prompts question.jsonl --only heads   one of them; --minutes N: stops, goes on again

The prompts are Spec-Bench's questions (data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench), of which
those whose id ends in 7 are not used. The target, its text (1.2 GB, under MOOT_CACHE) and then the drafters are made on
this machine: more than an hour, on two cores. Everything goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
from pathlib import Path

from moot.cli import main as moot
from moot.shipped import PREFIX, locate

RECIPES: dict[str, tuple[str, ...]] = {
    "suffix-smollm2-135m": (),
    "ngram-smollm2-135m": ("--kind", "ngram"),
    "heads-smollm2-135m": ("--kind", "heads", "--passes", "2"),
    "neural-smollm2-135m": ("--kind", "neural", "--passes", "3"),
}
"""What `moot train` is told of each; the datastore is made by `moot index`."""


def text_folder(made_of: list[str], flags: list[str]) -> str:
    """Of the training text, made if need be; empty: the time was over before."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = moot(["train", "--kind", "text", *made_of, *flags])
    if status:
        sys.exit(status)
    return printed.getvalue().strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--only", choices=[name.partition("-")[0] for name in RECIPES])
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--positions", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, help="folder of all of them (none: each where it lies)")
    arguments = parser.parse_args()
    made_of = ["--target", arguments.target, "--positions", str(arguments.positions)]
    end = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    for name, recipe in RECIPES.items():
        if arguments.only in (None, name.partition("-")[0]):
            flags = ["--prompts", str(arguments.prompts)]
            if end is not None:
                flags += ["--minutes", str(max(0.0, end - time.monotonic()) / 60)]
            out = ["--out", str(arguments.out / name if arguments.out else locate(PREFIX + name))]
            if recipe:
                status = moot(["train", *recipe, *made_of, *flags, *out])
            else:
                folder = text_folder(made_of, flags)
                status = (
                    moot(["index", "--text", folder, "--positions", str(arguments.positions), *out]) if folder else 0
                )
            if status:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
