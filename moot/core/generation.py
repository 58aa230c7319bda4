"""The state of one request and how a verification advances it.

The opening commits a first token and is no round. Every later verification is a round: its accepted tokens and one
next token are committed. Tokens behind a completed stop string are dropped before anything is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from moot.core.types import Draft, FinishReason, Proposal, SamplingParams, Verification


@dataclass(slots=True)
class DrafterCount:
    """Counts of one drafter in one request. 0 <= num_accepted_tokens <= num_proposed_tokens."""

    num_proposed_tokens: int = 0
    num_accepted_tokens: int = 0
    """Leading tokens of its own proposals that the target then emitted, won or not."""
    num_votes_won: int = 0


@dataclass(slots=True)
class Generation:
    """One choice of one request. `output_token_ids` may start with tokens committed elsewhere (moved or resumed).

    Invariants: sum(num_accepted_tokens_per_position) == num_accepted_tokens <= num_draft_tokens; next tokens are in
    neither.
    """

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens_per_position: list[int] = field(default_factory=list)
    drafters: dict[str, DrafterCount] = field(default_factory=dict)
    num_cached_tokens: int = 0

    @property
    def base_length(self) -> int:
        """Prompt plus committed tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def round_index(self) -> int:
        """Index of the round under way."""
        return self.num_rounds

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be emitted."""
        return max(self.params.max_tokens - len(self.output_token_ids), 0)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.num_accepted_tokens_per_position)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted; None before anything was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per round, the next token included; None before the first round."""
        return 1 + self.num_accepted_tokens / self.num_rounds if self.num_rounds else None

    def reject_reason(self, verification: Verification, draft: Draft | None = None) -> str | None:
        """Why `verification` must be dropped, or None: a label, `stale`, `finished` or `malformed`.

        `draft` is what was sent to verify; None for an opening.
        """
        if self.is_finished:
            return "finished"
        if verification.base_length != self.base_length:
            return "stale"
        num_output = len(verification.output_token_ids)
        ended = verification.finish_reason is not None
        if (
            not 0 <= verification.num_accepted <= num_output <= verification.num_accepted + 1
            or num_output > self.num_remaining
            or (num_output == verification.num_accepted and not ended)
            or not is_path(draft or Draft(), verification.output_token_ids[: verification.num_accepted])
        ):
            return "malformed"
        return None

    def open(
        self, verification: Verification, num_tokens_kept: int | None = None, stopped: bool = False
    ) -> Verification:
        """Commit the first token of an opened session. Not a round: nothing is counted but the token.

        `num_tokens_kept`, `stopped` and what is returned: see advance.
        """
        self._check(verification, None)
        self.num_cached_tokens = verification.num_cached_tokens
        return self._commit(verification, num_tokens_kept, stopped)

    def advance(
        self,
        verification: Verification,
        draft: Draft,
        proposals: Sequence[Proposal] = (),
        winner_ids: Sequence[str] = (),
        num_tokens_kept: int | None = None,
        stopped: bool = False,
    ) -> Verification:
        """Commit one round.

        `proposals`: those that voted; `winner_ids`: the drafters behind the whole voted path. `num_tokens_kept` of the
        output belong to the text (all when None); fewer only when a stop string was completed (`stopped`). Returns
        `verification` as it was committed: cut to what was kept, with the reason for which the request has now ended.
        Raises ValueError where `reject_reason` has one: a stale answer is never applied.
        """
        self._check(verification, draft)
        done = self._commit(verification, num_tokens_kept, stopped)
        self.num_rounds += 1
        self.num_draft_tokens += len(draft)
        positions = self.num_accepted_tokens_per_position
        positions.extend([0] * (done.num_accepted - len(positions)))
        for depth in range(done.num_accepted):
            positions[depth] += 1
        self._count(proposals, done.output_token_ids)
        # A vote without a draft decided nothing.
        for drafter_id in winner_ids if draft.token_ids else ():
            self._drafter(drafter_id).num_votes_won += 1
        return done

    def end(self, reason: FinishReason) -> None:
        """End for a reason of the router's own: abort or error. The first reason stays."""
        if self.finish_reason is None:
            self.finish_reason = reason

    def _check(self, verification: Verification, draft: Draft | None) -> None:
        if reason := self.reject_reason(verification, draft):
            raise ValueError(f"verification must not be applied: {reason}")

    def _commit(self, verification: Verification, num_tokens_kept: int | None, stopped: bool) -> Verification:
        token_ids = verification.output_token_ids
        kept = len(token_ids) if num_tokens_kept is None else num_tokens_kept
        if not 0 <= kept <= len(token_ids) or (kept < len(token_ids) and not stopped):
            raise ValueError("tokens may only be cut off by a stop")
        self.output_token_ids.extend(token_ids[:kept])
        if stopped:
            self.finish_reason = FinishReason.STOP
        elif verification.finish_reason is not None:
            self.finish_reason = verification.finish_reason
        elif self.num_remaining == 0:
            self.finish_reason = FinishReason.LENGTH
        if kept == len(token_ids) and self.finish_reason is verification.finish_reason:
            return verification
        return replace(
            verification,
            num_accepted=min(verification.num_accepted, kept),
            output_token_ids=token_ids[:kept],
            finish_reason=self.finish_reason,
            logprobs=verification.logprobs[:kept],
            top_candidates=verification.top_candidates[:kept],
        )

    def _count(self, proposals: Sequence[Proposal], token_ids: tuple[int, ...]) -> None:
        best: dict[str, int] = {}
        for proposal in proposals:
            drafter_id, proposed = proposal.drafter_id, proposal.token_ids
            matched = num_leading(proposed, token_ids)
            if matched > best.get(drafter_id, -1):
                best[drafter_id] = matched
            self._drafter(drafter_id).num_proposed_tokens += len(proposed)
        for drafter_id, matched in best.items():
            self._drafter(drafter_id).num_accepted_tokens += matched

    def _drafter(self, drafter_id: str) -> DrafterCount:
        count = self.drafters.get(drafter_id)
        if count is None:
            count = self.drafters[drafter_id] = DrafterCount()
        return count


def num_leading(proposed: Sequence[int], token_ids: Sequence[int]) -> int:
    """How many leading ids agree."""
    count = 0
    for mine, theirs in zip(proposed, token_ids, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def is_path(draft: Draft, token_ids: Sequence[int]) -> bool:
    """Whether the ids lead from the prefix into the draft, node by node."""
    return draft.follow(token_ids)[0] == len(token_ids)
