"""The drafting of one request whose verifier never waits: what its drafters proposed, how it votes, how far they draft.

Without I/O and without a clock. Whoever drives it (the router, the simulator) tells it what was committed and what a
drafter proposed, and sends what it then has to say: a draft to the verifier, questions to drafters. Proposals are held
for as long as they fit: each is for a length of its own, and moves with what is committed until it is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moot.core.generation import num_leading
from moot.core.speculation.length import PositionAcceptance, Probes, RoundSample
from moot.core.speculation.policy import PoolPolicy, learn_trie
from moot.core.stepping.held_draft import HeldDraft
from moot.core.types import Proposal
from moot.core.voting.calibration import OwnAcceptance
from moot.core.voting.voting import VoteResult, vote
from moot.core.voting.weights import WEIGHTS, Contest

_LAG_RATE = 0.2
"""How fast the tokens that are committed during one turnaround are followed."""
_PROBE = 2
"""Tokens that a probe drafts."""


@dataclass(slots=True)
class _Voice:
    """What one drafter of the request was told last, and what it proposed last. Lengths count committed tokens."""

    told_length: int = -1
    """-1: nothing."""
    is_answered: bool = True
    """It has proposed something since."""
    goal: int = 0
    """Length up to which it was told to draft."""
    reach: int = 0
    """Up to this length its tokens are scored where they are committed."""
    fitting: tuple[Proposal, ...] = ()
    is_lost: bool = False
    """What it drafts goes on from a token that was wrong."""

    def follow(self, token_ids: tuple[int, ...]) -> None:
        """Tokens were committed."""
        had, self.fitting = self.fitting, _after(self.fitting, token_ids)
        if had and not self.fitting:
            self.is_lost = not any(token_ids[: len(one.token_ids)] == one.token_ids for one in had)


class RequestDrafts:
    """The drafts of one request."""

    def __init__(
        self,
        pool: PoolPolicy,
        drafter_ids: Sequence[str],
        num_prompt_tokens: int,
        output_token_ids: Sequence[int],
        num_speculative_tokens: int | None = None,
    ) -> None:
        """`output_token_ids`: the request's own list, which grows as tokens are committed. `num_speculative_tokens`: n:
        drafts always n deep; 0: none; None: the price decides."""
        most = pool.options.num_speculative_tokens
        self._pool = pool
        self._output = output_token_ids
        self._num_prompt = num_prompt_tokens
        self._is_fixed = num_speculative_tokens is not None
        self._most = most if num_speculative_tokens is None else min(num_speculative_tokens, most)
        self._voices = {drafter_id: _Voice() for drafter_id in drafter_ids}
        self._weights = WEIGHTS[pool.options.weights](pool.pool_weights.start(drafter_ids))
        self._acceptance = OwnAcceptance(pool.acceptance)
        self._positions = PositionAcceptance(self._most, pool.positions)
        self._probes = Probes()
        self._result: VoteResult | None = None
        self._lag = 1.0
        """Tokens committed from a question to its proposal; a running mean."""
        self._per_step = 1.0
        """Tokens committed by a step; a running mean."""
        self._is_probe = False
        self.ahead = self._find_ahead()
        """How many tokens past the committed ones the drafters are to draft; 0: none."""

    @property
    def length(self) -> int:
        """Prompt plus committed tokens."""
        return self._num_prompt + len(self._output)

    def committed(
        self, token_ids: Sequence[int], num_accepted: int, price: float, local: Sequence[Proposal] = ()
    ) -> None:
        """One step committed these tokens, the last of the output; `num_accepted` of them were drafted.

        `price`: of a row in that step. `local`: proposals that drafters at the verifier made for the prefix before.
        """
        self._per_step += _LAG_RATE * (len(token_ids) - self._per_step)
        self._learn(tuple(token_ids), num_accepted, local)
        for voice in self._voices.values():
            voice.follow(tuple(token_ids))
        self._result = None
        self._pool.price = price
        self.ahead = self._find_ahead()

    def proposed(self, drafter_id: str, base_length: int, proposals: Sequence[Proposal]) -> bool:
        """Take a drafter's proposals for the prefix of `base_length` committed tokens. Whether any of them fits."""
        voice = self._voices[drafter_id]
        since = self._output[base_length - self._num_prompt :]
        if not voice.is_answered:
            voice.is_answered = True
            self._lag += _LAG_RATE * (self.length - voice.told_length - self._lag)
        for proposal in proposals:
            self._score_late(voice, base_length, proposal, since)
        fitting = _after(proposals, since)
        if fitting:
            voice.fitting, self._result = fitting, None
        return bool(fitting)

    def draft(self) -> HeldDraft | None:
        """The vote over all proposals that fit, for the verifier; None: nothing is proposed."""
        result = self._voted()
        if result is None or not result.draft.token_ids:
            return None
        return HeldDraft(self.length, result.draft, result.chances, tuple(result.trie.proposals))

    def questions(self) -> list[str]:
        """The drafters that have to be told now of the committed tokens and of `ahead`; they count as told."""
        told = [drafter_id for drafter_id, voice in self._voices.items() if self.ahead and self._is_due(voice)]
        for drafter_id in told:
            voice = self._voices[drafter_id]
            voice.told_length, voice.is_answered, voice.is_lost = self.length, False, False
            voice.goal = self.length + self.ahead
        return told

    def lost(self, drafter_id: str) -> None:
        """A drafter has lost its session and has to be told anew; what it proposed is as good as before."""
        self._voices[drafter_id].told_length = -1

    def close(self) -> None:
        """The request has ended, for whatever reason."""
        self._weights.finish()
        self._pool.pool_weights.flow_back(self._weights.numbers)

    def _is_due(self, voice: _Voice) -> bool:
        behind = self.length - voice.told_length
        if voice.told_length < 0 or not behind:
            return voice.told_length < 0
        if voice.fitting:
            # In time, so that it goes on without a pause; and where it has done all that it was told to.
            return behind >= max(self.ahead // 2, 1) or self.length + _longest(voice.fitting) >= voice.goal
        # Nothing of what is on its way can fit, or may fit any more.
        return voice.is_lost or voice.is_answered or behind >= self.ahead

    def _find_ahead(self) -> int:
        # The step under way when a draft comes commits some, and one more where the draft has waited its turn.
        late = round(self._lag + self._per_step) + 1
        if self._is_fixed:
            return self._most + late if self._most else 0
        chance, deepest = 1.0, 0
        for depth in range(self._most):
            chance *= self._positions.rate(depth)
            if chance <= self._pool.price:
                break
            deepest = depth + 1
        self._is_probe = deepest == 0
        if deepest:
            return deepest + late
        # Both count, whichever is due.
        is_due = self._probes.is_due() | self._pool.probes.is_due()
        return min(_PROBE, self._most) + late if is_due and self._most else 0

    def _voted(self) -> VoteResult | None:
        if self._result is None:
            proposals = self._fitting()
            self._result = self._vote(proposals) if proposals else None
        return self._result

    def _fitting(self) -> list[Proposal]:
        return [one for voice in self._voices.values() for one in voice.fitting]

    def _vote(self, proposals: Sequence[Proposal]) -> VoteResult:
        pool, options = self._pool, self._pool.options
        return vote(
            proposals,
            self._weights.numbers,
            policy=options.vote,
            shape=options.shape,
            max_draft_tokens=options.max_draft_tokens,
            calibration=pool.calibration,
            families=pool.families,
            acceptance=self._acceptance,
        )

    def _learn(self, token_ids: tuple[int, ...], num_accepted: int, local: Sequence[Proposal]) -> None:
        pool = self._pool
        came = self._voted()
        result = self._vote([*self._fitting(), *local]) if local else came
        for voice in self._voices.values():
            voice.reach = max(voice.reach, self.length - len(token_ids) + _longest(voice.fitting))
        if result is None:
            return
        learn_trie(result, token_ids, pool.calibration, pool.acceptance, self._acceptance)
        path = result.path_token_ids
        right = num_leading(path, token_ids)
        self._weights.observe(
            Contest(
                self._most, result.trie.proposals, token_ids, result.winner_ids, len(path), min(num_accepted, right)
            )
        )
        if came is not None:
            self._learn_depths(came, token_ids)

    def _learn_depths(self, came: VoteResult, token_ids: Sequence[int]) -> None:
        """How deep drafts are right that came from drafters, which are asked for no more than that."""
        pool = self._pool
        path = came.path_token_ids
        right = num_leading(path, token_ids)
        if path:
            sample = RoundSample(len(path), len(path), right, is_cut=right == len(token_ids) < len(path))
            self._positions.observe(sample)
            pool.positions.observe(sample)
            if self._is_probe and right == len(path):
                self._probes.accepted()
                pool.probes.accepted()

    def _score_late(self, voice: _Voice, base_length: int, proposal: Proposal, since: Sequence[int]) -> None:
        """Count the tokens of a proposal whose places were committed before it came, each once."""
        table = self._pool.calibration.of(proposal.drafter_id)
        confidences = proposal.confidences or (0,) * len(proposal.token_ids)
        for depth, (token, right) in enumerate(zip(proposal.token_ids, since, strict=False)):
            if base_length + depth >= voice.reach:
                table.record(confidences[depth], proposal.offset + depth, token == right)
                voice.reach = base_length + depth + 1
            if token != right:
                return


def _after(proposals: Sequence[Proposal], token_ids: Sequence[int]) -> tuple[Proposal, ...]:
    """What is left of proposals once these tokens were committed."""
    return tuple([rest for one in proposals if (rest := one.after(token_ids)) is not None])


def _longest(proposals: Sequence[Proposal]) -> int:
    """Tokens of the longest of these."""
    return max([len(one.token_ids) for one in proposals], default=0)
