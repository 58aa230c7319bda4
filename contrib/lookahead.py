"""Lookahead decoding, attached to the verifier (arXiv 2402.02057): n-grams that the target finds by guessing several
tokens ahead of itself.

A session has a window of guesses: level 0 is a chain of `window` tokens after the prefix, and every token of level j is
followed by one of level j + 1. All are fed in each step beside the draft. What the target says after the last level
completes one n-gram per column, which goes into a pool, and every level becomes the one before it (a Jacobi iteration).
Proposals are the pool's n-grams that begin with the last committed token, one after the other.

Confidence byte: 32 times how often the n-gram was found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from moot.core.options import option
from moot.core.types import ROOT, Proposal
from moot.drafters.attached.attached_interface import NO_GUESSES, AttachedAsk, AttachedDrafter, Guesses
from moot.drafters.attached.kinds import AttachedKind
from moot.drafters.interface import DrafterOptions
from moot.model.runner import ModelRunner

_MOST_KEYS = 4096
"""First tokens in the pool of one session; the least recent goes first."""


@dataclass(frozen=True, kw_only=True)
class LookaheadOptions(DrafterOptions):
    window: int = option(
        4, help="places ahead that are guessed; each costs ngram - 1 rows of every step", minimum=1, maximum=32
    )
    ngram: int = option(3, help="length of the n-grams that are collected", minimum=2, maximum=8)
    pool: int = option(5, help="n-grams kept for one first token", minimum=1, maximum=64)


Pool = OrderedDict[int, OrderedDict[tuple[int, ...], int]]
"""First token to what has followed it, the latest last, and how often."""


@dataclass(slots=True)
class _Session:
    """`levels[j][i]`: the guess for position length + i + j. `num_fed`: columns in the step under way."""

    length: int
    levels: list[list[int]]
    pool: Pool = field(default_factory=OrderedDict)
    num_fed: int = 0


class LookaheadDrafter(AttachedDrafter):
    kind = "lookahead"
    needs_rounds = True

    def __init__(self, drafter_id: str, options: LookaheadOptions, runner: ModelRunner) -> None:
        self.drafter_id = drafter_id
        self.family = options.family or self.kind
        self._options = options
        self._ends = runner.info.end_token_ids
        self._sessions: dict[int, _Session] = {}

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def guess(self, session: int, token_ids: Sequence[int], num_rows: int, depth: int) -> Guesses:
        one = self._of(session, token_ids)
        num_levels = len(one.levels)
        columns = min(self._options.window, num_rows // num_levels, depth - num_levels + 1)
        if columns < 1 or one.length != len(token_ids):
            one.num_fed = 0
            return NO_GUESSES
        one.num_fed = columns
        ids = [level[column] for level in one.levels for column in range(columns)]
        chain = [column - 1 if column else ROOT for column in range(columns)]
        return Guesses(tuple(ids), (*chain, *range(len(ids) - columns)))

    def propose(self, asks: Sequence[AttachedAsk]) -> list[list[Proposal]]:
        answers: list[list[Proposal]] = []
        for ask in asks:
            one = self._of(ask.session, ask.token_ids)
            if ask.answers:
                self._learn(one, ask.answers)
            self._move(one, len(ask.token_ids))
            answers.append(self._chains(one.pool, ask))
        return answers

    def end(self, session: int) -> None:
        self._sessions.pop(session, None)

    def _of(self, session: int, token_ids: Sequence[int]) -> _Session:
        one = self._sessions.get(session)
        if one is None:
            # To begin with, the text goes on as it went before.
            window, num_levels = self._options.window, self._options.ngram - 1
            last = list(token_ids[-window - num_levels :])
            levels = [[last[(level + column) % len(last)] for column in range(window)] for level in range(num_levels)]
            one = self._sessions[session] = _Session(len(token_ids), levels)
        return one

    def _learn(self, one: _Session, answers: Sequence[int | None]) -> None:
        """Collect the n-grams that the answers complete; every level takes the place of the one before it."""
        columns, levels = one.num_fed, one.levels
        found = answers[len(answers) - columns :] if columns else ()
        for column, answer in enumerate(found):
            if answer is None:
                continue
            gram = (*(level[column] for level in levels), answer)
            self._keep(one.pool, gram)
            for level, following in zip(gram[1:], levels, strict=True):
                following[column] = level
        one.num_fed = 0
        # Each guess is now for one place further on.
        one.length += 1

    def _keep(self, pool: Pool, gram: tuple[int, ...]) -> None:
        known = pool.setdefault(gram[0], OrderedDict())
        pool.move_to_end(gram[0])
        known[gram[1:]] = known.pop(gram[1:], 0) + 1
        if len(known) > self._options.pool:
            known.popitem(last=False)
        if len(pool) > _MOST_KEYS:
            pool.popitem(last=False)

    def _move(self, one: _Session, length: int) -> None:
        """Leave out the columns of tokens that are committed by now; they come in again at the far end."""
        gone = (length - one.length) % self._options.window
        for level in one.levels:
            level[:] = level[gone:] + level[:gone]
        one.length = length

    def _chains(self, pool: Pool, ask: AttachedAsk) -> list[Proposal]:
        ends = ask.params.ending_token_ids(self._ends)
        found: list[Proposal] = []
        firsts: set[int] = set()
        for gram, count in _best(pool, ask.token_ids[-1]):
            if len(found) == ask.width or gram[0] in firsts:
                continue
            firsts.add(gram[0])
            ids, counts = list(gram), [count] * len(gram)
            while len(ids) < ask.num_tokens and (more := _best(pool, ids[-1])):
                (following, often), *_ = more
                ids += following
                counts += [often] * len(following)
            length = next((place for place, id_ in enumerate(ids, 1) if id_ in ends), len(ids))
            length = min(length, ask.num_tokens)
            found.append(Proposal(tuple(ids[:length]), tuple(min(255, 32 * often) for often in counts[:length])))
        return found


def _best(pool: Pool, token_id: int) -> list[tuple[tuple[int, ...], int]]:
    """What follows `token_id`, the most frequent first, of equals the latest."""
    known = pool.get(token_id)
    return sorted(reversed(known.items()), key=lambda item: -item[1]) if known else []


KIND = AttachedKind("lookahead", LookaheadOptions, LookaheadDrafter)
