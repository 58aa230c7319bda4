"""What the target accepts of a draft: sample and match.

At each position the target samples its own token, from the committed prefix and the draft tokens accepted so far. While
that token is one of the draft's continuations the walk goes on through it; the first token that is not one is emitted
too (the recovered token, or the bonus token where the draft is used up). Nothing else decides: the emitted ids are
what plain decoding emits, whatever the draft holds. Daliri, Musco, Suresh, arXiv 2408.07978.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moot.core.types import ROOT, Draft, FinishReason


@dataclass(frozen=True, slots=True)
class Walk:
    """Path of one verification through a draft.

    `output_token_ids` are the ids of `accepted_nodes`, then one next token unless the request ended inside the draft.
    """

    accepted_nodes: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    finish: FinishReason | None

    @property
    def num_accepted(self) -> int:
        return len(self.accepted_nodes)


def walk(
    draft: Draft,
    token_at: Callable[[int, tuple[int, ...]], int],
    is_end: Callable[[int, int], bool],
    max_new: int,
) -> Walk:
    """Follow the target's own tokens through `draft`, a chain or a tree.

    `token_at(node, path)` is the target's token after draft node `node` (ROOT: after the committed prefix), where
    `path` holds the ids of the draft tokens accepted so far. It is asked once per emitted token, along the accepted
    path only, so that rows off the path are never sampled. `is_end(token, n)` says whether `token`, as the n-th token
    of this walk, ends the request (an end or stop id, min_tokens considered). `max_new` is the number of tokens the
    request may still emit; with 0 nothing is asked.
    """
    edges = zip(draft.parents, draft.token_ids, strict=True)
    children = {edge: node for node, edge in enumerate(edges)}
    node: int | None = ROOT
    accepted: list[int] = []
    output: tuple[int, ...] = ()
    while node is not None:
        if len(output) >= max_new:
            return Walk(tuple(accepted), output, FinishReason.LENGTH)
        # Every token emitted so far was accepted: a token that is not accepted ends the loop.
        token = token_at(node, output)
        output = (*output, token)
        node = children.get((node, token))
        if node is not None:
            accepted.append(node)
        if is_end(token, len(output)):
            return Walk(tuple(accepted), output, FinishReason.STOP)
    finish = FinishReason.LENGTH if len(output) >= max_new else None
    return Walk(tuple(accepted), output, finish)


def validate_draft(draft: Draft, vocab_size: int, max_tokens: int) -> str | None:
    """Why `draft` must not be verified, or None: for a verifier, which must not trust the sender.

    `vocab_size` is the tokenizer's: an id in the padding of the model's vocabulary is refused as well.
    """
    if len(draft.token_ids) != len(draft.parents):
        return "token ids and parents differ in number"
    if len(draft.token_ids) > max_tokens:
        return f"more than {max_tokens} draft tokens"
    seen: set[tuple[int, int]] = set()
    for index, (parent, token) in enumerate(zip(draft.parents, draft.token_ids, strict=True)):
        if not ROOT <= parent < index:
            return "a parent does not stand before its child"
        if not 0 <= token < vocab_size:
            return "token id outside the vocabulary"
        if (parent, token) in seen:
            return "siblings with the same token id"
        seen.add((parent, token))
    return None
