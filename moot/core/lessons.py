"""What a committed round says about its proposals: which tokens were right, and how far each drafter was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moot.core.ballot import PREFIX
from moot.core.calibration import Calibration, OwnAcceptance, ShareAcceptance
from moot.core.generation import Advance, num_leading
from moot.core.panel import Answer
from moot.core.types import Proposal
from moot.core.voting import VoteResult


def learn_ballot(
    result: VoteResult,
    token_ids: Sequence[int],
    calibration: Calibration,
    acceptance: ShareAcceptance,
    own: OwnAcceptance | None = None,
) -> None:
    """Score every proposed token whose predecessors were all right against the committed `token_ids`, verified or not.
    `own`: what is learned of this request alone.

    What comes after a wrong token, or after the end of the committed text, says nothing.
    """
    ballot, shares = result.ballot, result.shares.known()
    tables = [calibration.of(drafter_id) for drafter_id in ballot.drafter_ids]
    node = PREFIX
    for depth, token in enumerate(token_ids):
        children = ballot.children[node]
        right = children.get(token)
        for child in children.values():
            for drafter, confidence in ballot.voters[child]:
                tables[drafter].record(confidence, depth, child == right)
        offered = shares.get(node, ())
        if own is not None and offered:
            # Before the pool has learned the answer.
            own.record([share for _, share in offered], depth, right is not None)
        for child, share in offered:
            acceptance.record(share, depth, child == right)
        if right is None:
            return
        node = right


def heard(answers: Mapping[str, float | None], proposals: Sequence[Proposal], advance: Advance) -> dict[str, Answer]:
    """Per drafter that was asked, how far one of its proposals was right in a committed round, and when it was there.

    `answers`: seconds until each answer, None where it missed the vote.
    """
    accepted = advance.token_ids[: advance.num_accepted]
    right = dict.fromkeys(answers, 0)
    for proposal in proposals:
        if proposal.drafter_id in right:
            right[proposal.drafter_id] = max(right[proposal.drafter_id], num_leading(proposal.token_ids, accepted))
    return {drafter_id: Answer(right[drafter_id], seconds) for drafter_id, seconds in answers.items()}
