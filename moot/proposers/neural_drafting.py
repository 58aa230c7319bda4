"""How a draft model drafts: chains, one token a forward for all sessions together, and branches as one tree each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moot.model.sampler import Sampler
from moot.proposers.neural_feed import SessionFeed
from moot.proposers.neural_session import Drafted, NeuralSession


class NeuralDrafting:
    """`min_confidence`: a path ends before a token less probable. `sharpen`: multiplies the logits that are sampled."""

    def __init__(self, feed: SessionFeed, sampler: Sampler, min_confidence: float, sharpen: float) -> None:
        self._feed = feed
        self._sampler = sampler
        self._min_confidence = min_confidence
        self._sharpen = sharpen

    def chains(self, goals: Sequence[tuple[NeuralSession, int]], ahead: set[int]) -> None:
        """Lengthen every session's path to its goal, one token a forward. `ahead`: identities of those who give way."""
        while goals := [(s, goal) for s, goal in goals if len(s.ahead) < goal and not s.stopped]:
            asked = [session for session, _ in goals if id(session) not in ahead]
            self._feed.prefill(asked)
            # One that gives way may have lost its cache to an ask by now.
            fit = [s for s, _ in goals if not s.stopped and not (id(s) in ahead and s.num_missing > 0)]
            work = [(session, session.last_id()) for session in fit]
            rows: list[Tensor] = []
            fed: list[NeuralSession] = []
            for session, _, logits in self._feed.forward(work, asked, ahead):
                if logits is not None:
                    session.cache.commit((0,))
                    rows.append(logits)
                    fed.append(session)
            unfed = ahead.difference(map(id, fed))
            goals = [(session, goal) for session, goal in goals if id(session) not in unfed]
            if fed:
                self._lengthen(torch.cat(rows), fed)

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
        """Each session's path by one token, or stop it. `logits`: [len(sessions), vocab]."""
        drafted = self._next([(session, session.ahead) for session in sessions], logits)
        for session, entry in zip(sessions, drafted, strict=True):
            if entry is not None:
                session.ahead.append(entry)
            session.stopped = entry is None or self._ends(session, entry[0])

    def _next(self, paths: Sequence[tuple[NeuralSession, list[Drafted]]], logits: Tensor) -> list[Drafted | None]:
        """The token after each path; None where the row is not finite or the token too unlikely.

        `logits`: [len(paths), vocab], one row per path.
        """
        tokens: list[int | None] = self._sampler.greedy_rows(logits)
        for index, (session, path) in enumerate(paths):
            if tokens[index] is not None and self._sampler.needs_row(session.params, 0):
                past = session.history
                history = None if past is None else past.with_path([token for token, _ in path])
                (tokens[index],) = self._sampler.draft_tokens(
                    logits[index : index + 1],
                    [session.params],
                    [len(session.tokens) + len(path)],
                    None if history is None else [history],
                    self._sharpen,
                )
        shares = self._sampler.probabilities(logits, [token or 0 for token in tokens])
        return [
            None if token is None or not share >= self._min_confidence else (token, round(255 * share))
            for token, share in zip(tokens, shares, strict=True)
        ]

    def _ends(self, session: NeuralSession, token: int) -> bool:
        return token in session.params.ending_token_ids(self._sampler.end_token_ids)
