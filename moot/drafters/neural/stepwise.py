"""Stepwise drafting of a draft model: chains, a token or a guess a forward for all sessions at once, and branches as
trees."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from moot.core.acceptance import walk
from moot.core.types import Draft
from moot.drafters.neural.neural_sessions import Drafted, NeuralSession, SessionFeed
from moot.drafters.neural.stages import GuessingStage
from moot.model.sampling.sampler import Sampler

_NOTHING = -1


class NeuralDrafting:
    """Drafting by steps. `min_confidence`: a path ends before a token less probable. `sharpen`: multiplies the logits
    that are sampled.

    `stage`: guesses what comes next, so that one forward may lengthen a path by several tokens. `least`: a path that is
    less probable than this as a whole is not lengthened.
    """

    def __init__(
        self,
        feed: SessionFeed,
        sampler: Sampler,
        min_confidence: float,
        sharpen: float,
        stage: GuessingStage | None = None,
        least: float = 0.0,
    ) -> None:
        self._stage = stage
        self._least = least
        self.num_gone_along = 0
        """Ids of guesses that became part of a path."""
        self._feed = feed
        self._sampler = sampler
        self._min_confidence = min_confidence
        self._sharpen = sharpen

    def chains(self, goals: Sequence[tuple[NeuralSession, int]], ahead: set[int]) -> None:
        """Lengthen every path to its goal, or by a guess past it. `ahead`: identities of sessions that give way."""
        while goals := [(s, goal) for s, goal in goals if len(s.ahead) < goal and self._goes_on(s)]:
            asked = [session for session, _ in goals if id(session) not in ahead]
            self._feed.prefill(asked)
            # One that gives way may have lost its cache to an ask by now.
            fit = [s for s, _ in goals if not s.stopped and not (id(s) in ahead and s.num_missing > 0)]
            guesses = [()] * len(fit) if self._stage is None else self._stage.guesses(fit)
            work = [(session, session.last_id(guess)) for session, guess in zip(fit, guesses, strict=True)]
            fed = [
                (session, guess, logits)
                for (session, _, logits), guess in zip(self._feed.forward(work, asked, ahead), guesses, strict=True)
                if logits is not None
            ]
            unfed = ahead.difference(id(session) for session, _, _ in fed)
            goals = [(session, goal) for session, goal in goals if id(session) not in unfed]
            self._take(fed)

    def _goes_on(self, session: NeuralSession) -> bool:
        return not session.stopped and num_likely(session.ahead, self._least) == len(session.ahead)

    def _take(self, fed: Sequence[tuple[NeuralSession, Sequence[int], Tensor]]) -> None:
        """Sessions that were fed their path's end and a guess, with the rows of both."""
        single: list[NeuralSession] = []
        ends: list[Tensor] = []
        for session, guess, logits in fed:
            if guess:
                self._go_along(session, guess, logits)
            else:
                session.cache.commit((0,))
                single.append(session)
                ends.append(logits)
        if single:
            self._lengthen(torch.cat(ends), single)

    def branches(self, goals: Sequence[tuple[NeuralSession, int, int]]) -> dict[int, list[list[Drafted]]]:
        """Per session up to `width` paths that part at their first token. The first one becomes `ahead`.

        `goals`: session, length, width. All paths of a session are fed as one tree, whole at each depth: few and short,
        they cost one forward together.
        """
        sessions = [session for session, _, _ in goals]
        for session in sessions:
            session.drop_path()
        self._feed.prefill(sessions)
        branches = {id(session): self._first_tokens(session, width, sessions) for session, _, width in goals}
        ended = {
            (id(session), index)
            for session, _, _ in goals
            for index, path in enumerate(branches[id(session)])
            if self._ends(session, path[0][0])
        }
        while True:
            work, leaves = [], []
            for session, goal, _ in goals:
                paths = branches[id(session)]
                live = [i for i, path in enumerate(paths) if len(path) < goal and (id(session), i) not in ended]
                if live and not session.stopped:
                    work.append((session, session.tree(paths, live)))
                    leaves.append(live)
            if not work:
                break
            for (session, _, logits), live in zip(self._feed.forward(work, sessions), leaves, strict=True):
                paths = branches[id(session)]
                if logits is None:
                    continue
                for index, entry in zip(live, self._next([(session, paths[i]) for i in live], logits), strict=True):
                    if entry is not None:
                        paths[index].append(entry)
                    if entry is None or self._ends(session, entry[0]):
                        ended.add((id(session), index))
                session.cache.commit(())
        for session, _, _ in goals:
            paths = branches[id(session)]
            session.ahead = paths[0] if paths else []
            session.stopped |= (id(session), 0) in ended
        return branches

    def _first_tokens(self, session: NeuralSession, width: int, busy: Sequence[NeuralSession]) -> list[list[Drafted]]:
        """The `width` best tokens after the prefix by the draft's own rule, each as the begin of a path."""
        if session.stopped:
            return []
        ((_, _, logits),) = self._feed.forward([(session, session.last_id())], busy)
        if logits is None:
            return []
        session.cache.commit((0,))
        row = logits.clone()
        paths: list[list[Drafted]] = []
        for _ in range(min(width, self._sampler.vocab_size)):
            (entry,) = self._next([(session, [])], row)
            if entry is None:
                break
            share = self._sampler.probabilities(logits, [entry[0]])[0]
            if not share >= self._min_confidence:
                break
            paths.append([(entry[0], round(255 * share))])
            row[0, entry[0]] = float("-inf")
        return paths

    def _lengthen(self, logits: Tensor, sessions: Sequence[NeuralSession]) -> None:
        """Lengthen each session's path by one token, or stop it. `logits`: [len(sessions), vocab]."""
        drafted = self._next([(session, session.ahead) for session in sessions], logits)
        for session, entry in zip(sessions, drafted, strict=True):
            if entry is not None:
                session.ahead.append(entry)
            session.stopped = entry is None or self._ends(session, entry[0])

    def _go_along(self, session: NeuralSession, guess: Sequence[int], logits: Tensor) -> None:
        """Lengthen the path by as much of a guess as the draft's own rule says too, and by one own token.

        `logits`: [1 + ids guessed, vocab].
        """
        paths = [[*session.ahead, *((token, 0) for token in guess[:n])] for n in range(len(guess) + 1)]
        known: list[Drafted | None] = []
        if not self._sampler.needs_row(session.params, 0):
            known = self._next([(session, path) for path in paths], logits)
        drafted: list[Drafted] = []

        def token_at(node: int, _: tuple[int, ...]) -> int:
            row = node + 1
            # Drawing is expensive: only for rows that are reached, where it is for one.
            entry = known[row] if known else self._next([(session, paths[row])], logits[row : row + 1])[0]
            if entry is None:
                return _NOTHING
            drafted.append(entry)
            return entry[0]

        def is_end(token: int, _: int) -> bool:
            return token == _NOTHING or self._ends(session, token)

        found = walk(Draft.chain(tuple(guess)), token_at, is_end, sys.maxsize)
        # The path's end is fed when the path is to be lengthened, as without a guess.
        session.cache.commit(range(len(found.output_token_ids)))
        session.ahead.extend(drafted)
        session.stopped = found.finish is not None
        self.num_gone_along += found.num_accepted

    def _next(self, paths: Sequence[tuple[NeuralSession, list[Drafted]]], logits: Tensor) -> list[Drafted | None]:
        """The token after each path; None where the row is not finite or the token too unlikely.

        `logits`: [len(paths), vocab], one row per path.
        """
        positions = [len(session.tokens) + len(path) for session, path in paths]
        histories = [session.history_with([token for token, _ in path]) for session, path in paths]
        params = [session.params for session, _ in paths]
        tokens = self._sampler.draft_tokens(logits, params, positions, histories, self._sharpen)
        shares = self._sampler.probabilities(logits, [token or 0 for token in tokens])
        return [
            None if token is None or not share >= self._min_confidence else (token, round(255 * share))
            for token, share in zip(tokens, shares, strict=True)
        ]

    def _ends(self, session: NeuralSession, token: int) -> bool:
        return token in session.params.ending_token_ids(self._sampler.end_token_ids)


def num_likely(path: Sequence[Drafted], least: float) -> int:
    """How many tokens of a path come before it gets, as a whole, less probable than `least`; by its confidence bytes.

    Once its begin is committed, what is left may be likely enough again.
    """
    if least <= 0.0:
        return len(path)
    chance = 1.0
    for index, (_, confidence) in enumerate(path):
        chance *= confidence / 255
        if chance < least:
            return index
    return len(path)
