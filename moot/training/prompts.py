"""Prompts put together at random from our own words: tasks on topics, sums, code, translations, summaries, turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from moot.training import material


class Turn(NamedTuple):
    """What a user says. `is_open`: only how it begins; the target writes the rest of it."""

    text: str
    is_open: bool = False


Rng = np.random.Generator

_TOPICS, _TASKS = material.entries(material.TOPICS), material.entries(material.TASKS)
_FOLLOW_UPS, _SEEDS = material.entries(material.FOLLOW_UPS), material.entries(material.OPEN_SEEDS)
_GERMAN, _FRENCH = material.entries(material.GERMAN), material.entries(material.FRENCH)
_ENGLISH, _CODE = material.entries(material.ENGLISH), material.entries(material.CODE_TASKS)
_SUBJECTS, _ACTIONS = material.entries(material.SUBJECTS), material.entries(material.ACTIONS)
_NAMES, _THINGS = material.entries(material.NAMES), material.entries(material.THINGS)
_DETAILS = material.entries(material.DETAILS)


def pick(rng: Rng, options: Sequence[str]) -> str:
    return options[int(rng.integers(len(options)))]


def built_in(rng: Rng) -> list[Turn]:
    """The user's turns of one conversation: 1 to 3 of them."""
    first = _KINDS[int(rng.choice(len(_KINDS), p=_SHARES))](rng)
    follow_ups = int(rng.choice(3, p=(0.6, 0.25, 0.15)))
    return [Turn(first), *(Turn(pick(rng, _FOLLOW_UPS)) for _ in range(follow_ups))]


def free_running(rng: Rng) -> list[Turn]:
    """A user's turn that the target writes: all of it, or from a few words on; a second one now and then."""
    turns = [Turn(pick(rng, _SEEDS) if rng.random() < 0.6 else "", True)]
    return turns if rng.random() < 0.7 else [*turns, Turn("", True)]


def passage(rng: Rng) -> str:
    """A few sentences like those of a local newspaper."""
    parts = [
        f"{pick(rng, _SUBJECTS)} {pick(rng, _ACTIONS)}. {' '.join(rng.permutation(_DETAILS)[: rng.integers(2, 5)])}"
        for _ in range(int(rng.integers(1, 4)))
    ]
    return " ".join(parts)


def _task(rng: Rng) -> str:
    return pick(rng, _TASKS).format(t=pick(rng, _TOPICS), u=pick(rng, _TOPICS))


def _question(rng: Rng) -> str:
    forms = ("what is {t}", "who first wrote about {t}", "when did people begin to study {t}", "where can I see {t}?")
    return pick(rng, forms).format(t=pick(rng, _TOPICS))


def _arithmetic(rng: Rng) -> str:
    name, other = pick(rng, _NAMES), pick(rng, _NAMES)
    thing, start = pick(rng, _THINGS), int(rng.integers(12, 95))
    more, part, price = int(rng.integers(3, 30)), int(rng.integers(2, 12)), int(rng.integers(2, 15))
    forms = (
        f"{name} has {start} {thing} and buys {more} more. Then {name} gives {part} of them to {other}. How many"
        f" {thing} does {name} have left?",
        f"{name} sells {thing} for {price} dollars each. On Monday {part} are sold and on Tuesday {more}. How much"
        f" money does {name} earn?",
        f"There are {start} {thing} in each of {part} boxes. {more} {thing} are broken. How many are not broken?",
        f"{name} walks {part} miles every day, and {other} walks {price} miles every day. How many miles have they"
        f" walked together after {more} days?",
        f"{name} reads {part} pages in the morning and twice as many in the evening. How many days does a book of"
        f" {part * 3 * more} pages take?",
        f"What is {start} times {part}, plus {more}?",
        f"A room is {start} metres long and {part} metres wide. What is its area, and what is its perimeter?",
        f"{name} is {more} years older than {other}. Together they are {start + more} years old. How old is {other}?",
    )
    ending = pick(rng, ("", "", " Explain step by step.", " Show your work."))
    return pick(rng, forms) + ending


def _code(rng: Rng) -> str:
    language = pick(rng, material.CODE_LANGUAGES)
    forms = (
        "Write a {l} function that {c}.",
        "Write a {l} program that {c}. Explain how it works.",
        "In {l}, {c}: how?",
    )
    return pick(rng, forms).format(l=language, c=pick(rng, _CODE))


def _translation(rng: Rng) -> str:
    which = rng.random()
    if which < 0.6:
        first, second = pick(rng, _GERMAN), pick(rng, _GERMAN)
        text = first if rng.random() < 0.7 else f"{first} {second}"
        return pick(rng, ("Translate German to English: ", "Translate into English: ", "What does this mean? ")) + text
    if which < 0.75:
        return f"Translate French to English: {pick(rng, _FRENCH)}"
    return f"Translate into {pick(rng, material.LANGUAGES)}: {pick(rng, _ENGLISH)}"


def _summary(rng: Rng) -> str:
    forms = ("Summarize: ", "Summarize the following text in one sentence.\n\n", "Write a headline for this text: ")
    return pick(rng, forms) + passage(rng)


def _reading(rng: Rng) -> str:
    text, question = passage(rng), pick(rng, ("Who is it about?", "What was decided?", "What happened, and why?"))
    forms = (
        f"Answer the question from the text.\n\nText: {text}\n\nQuestion: {question}\n\nAnswer:",
        f"{text}\n\n{question}",
        f"Rewrite this text in simple words: {text}",
        f"List the facts in this text: {text}",
    )
    return pick(rng, forms)


_KINDS: tuple[Callable[[Rng], str], ...] = (_task, _question, _arithmetic, _code, _translation, _summary, _reading)
_SHARES = (0.36, 0.1, 0.17, 0.09, 0.1, 0.09, 0.09)
