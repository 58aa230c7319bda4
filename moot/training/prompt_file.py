"""Prompts from a file of JSON lines, without those that are kept for measuring."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moot.core.errors import ConfigError
from moot.training.prompts import Turn

HELD_OUT_DIGIT = "7"
"""Spec-Bench questions whose id ends in it are what drafters are measured on."""


def read_prompts(path: Path) -> tuple[list[list[Turn]], int]:
    """The user's turns of each conversation, and how many lines were refused because they are held out.

    A line is an object with `turns` (texts) or `prompt` (a text), and perhaps a `question_id`. Raises ConfigError,
    naming the line, for anything else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read prompts {path}: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    conversations, refused = [], 0
    for number, line in numbered:
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        if is_held_out(entry):
            refused += 1
            continue
        conversations.append([Turn(text) for text in _texts(entry, f"{path}, line {number}")])
    if not conversations:
        raise ConfigError(f"{path} has no prompt that may be trained on")
    return conversations, refused


def is_held_out(entry: Any) -> bool:
    return isinstance(entry, dict) and str(entry.get("question_id", "")).strip().endswith(HELD_OUT_DIGIT)


def _texts(entry: Any, place: str) -> Iterable[str]:
    texts = (entry.get("turns") or [entry.get("prompt")]) if isinstance(entry, dict) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ConfigError(f"{place} has neither turns (texts) nor a prompt (a text)")
    return texts
