"""How several sequences are drafted with one row per token: all sessions in one forward for each depth.

Rows behind a draft model's embeddings that hold weighted sums of them, so that a sum can be fed like an id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from contrib.superposed.beam import SILENT, Beam, Grown, Likely, Voice, interpolated, voice_after
from moot.core.errors import RequestPoisoned
from moot.drafters.lookup.ngram import NgramTable
from moot.drafters.neural.neural_sessions import NeuralSession, SessionFeed
from moot.model.decoder.decoder import Decoder
from moot.model.inputs import SequenceInput
from moot.model.loading.load import LoadedModel
from moot.model.sampling.sampler import Sampler, likeliest


class MixedRows:
    """Widens the embeddings of `loaded` by `count` rows. Ids of texts are below `num_ids`, as before.

    `loaded`, the attribute, is the model to build a runner of; the one that was handed in computes no more. Embeddings
    are looked up, scaled and projected linearly in every family, so that a sum of rows is the sum of what is made of
    them.
    """

    def __init__(self, loaded: LoadedModel, count: int) -> None:
        embeddings: Any = loaded.model.get_input_embeddings()  # type: ignore[operator]
        table = torch.cat((embeddings.weight.detach(), embeddings.weight.new_zeros(count, embeddings.weight.shape[1])))
        embeddings.weight = nn.Parameter(table, requires_grad=False)
        embeddings.num_embeddings = table.shape[0]
        self._table = embeddings.weight.detach()
        decoder = loaded.decoder
        if decoder is not None:
            decoder = Decoder(replace(decoder.weights, embedding=self._table), decoder.kernels)
        self.num_ids = loaded.num_embeddings
        self.count = count
        self.loaded = replace(loaded, decoder=decoder, num_embeddings=self.num_ids + count)

    @torch.inference_mode()
    def put(self, row: int, token_ids: Sequence[int], weights: Sequence[float]) -> int:
        """Write the weighted sum of the embeddings of `token_ids` into row number `row`; returns what to feed for it.

        A single id needs no row: it is returned as it is. Weights are finite and sum to 1.
        """
        if len(token_ids) == 1:
            return token_ids[0]
        table = self._table
        exact = torch.promote_types(table.dtype, torch.float32)
        rows = table[torch.tensor(token_ids, device=table.device)].to(exact)
        table[self.num_ids + row] = torch.tensor(weights, dtype=exact, device=table.device) @ rows
        return self.num_ids + row


class SuperposedDrafting:
    """`table`, `weight`, `strength`: who tells the sequences apart, see superposed_voices. `least`: a sequence ends
    before a token less probable. `sharpen`: multiplies the logits that are drawn from with noise."""

    def __init__(
        self,
        feed: SessionFeed,
        sampler: Sampler,
        rows: MixedRows,
        num_sequences: int,
        table: NgramTable | None,
        weight: float,
        strength: float,
        least: float,
        sharpen: float,
    ) -> None:
        self._feed = feed
        self._sampler = sampler
        self._rows = rows
        self._num_sequences = num_sequences
        self._table = table
        self._weight = weight
        self._strength = strength
        self._least = least
        self._sharpen = sharpen

    def draft(self, goals: Sequence[tuple[NeuralSession, int]]) -> list[Beam]:
        """For each session its sequences of at most so many ids; as many sessions as there are rows to mix in.

        Afterwards the caches hold the prefixes and nothing else.
        """
        sessions = [session for session, _ in goals]
        beams = [Beam(self._num_sequences) for _ in goals]
        for session in sessions:
            session.drop_path()
        self._feed.prefill(sessions)
        try:
            for depth in range(max((length for _, length in goals), default=0)):
                work = [
                    (session, self._input(session, beam, row))
                    for row, ((session, length), beam) in enumerate(zip(goals, beams, strict=True))
                    if depth < length and beam.live and not session.stopped
                ]
                if not work:
                    break
                beam_of = {id(session): beam for session, beam in zip(sessions, beams, strict=True)}
                for session, _, logits in self._feed.forward(work, sessions):
                    if logits is not None:
                        session.cache.commit((0,))
                        self._grow(session, beam_of[id(session)], logits)
        finally:
            for session in sessions:
                session.cache.crop(min(session.cache.length, len(session.tokens)))
                session.stopped = False
        return beams

    def _input(self, session: NeuralSession, beam: Beam, row: int) -> SequenceInput:
        if not beam.live[0].path:
            return session.last_id()
        token_ids, weights = beam.mixture()
        beam.is_mixed |= len(token_ids) > 1
        return SequenceInput(session.cache, (self._rows.put(row, token_ids, weights),), None, (0,))

    def _grow(self, session: NeuralSession, beam: Beam, logits: Tensor) -> None:
        """`logits`: [1, vocab], of the row that stands for the live sequences of `beam`."""
        live = beam.live
        voices = [self._voice(session, one) if beam.is_mixed else SILENT for one in live]
        shares: list[dict[int, float]] = []
        if session.history is None:
            wanted = {token for voice in voices for token in voice.extra}
            law = self._law(session, live[0], logits, wanted)
            shares = [interpolated(law, voice, self._weight) for voice in voices]
        else:
            # Penalties are of each sequence's own past.
            for one, voice in zip(live, voices, strict=True):
                shares.append(interpolated(self._law(session, one, logits, voice.extra), voice, self._weight))
        beam.grow(shares, session.params.ending_token_ids(self._sampler.end_token_ids), self._least)

    def _voice(self, session: NeuralSession, one: Grown) -> Voice:
        table = self._table
        if table is None or self._weight == 0.0:
            return SILENT
        path = one.token_ids
        short = table.max_order - len(path)
        context = [*session.tokens[-short:], *path] if short > 0 else path
        return voice_after(table, context, self._strength, self._sampler.vocab_size)

    def _law(self, session: NeuralSession, one: Grown, logits: Tensor, wanted: Iterable[int]) -> Likely:
        """The likeliest ids of a row by the request's rule and noise, best first, then those `wanted`; none of a row
        that is not finite."""
        path = one.token_ids
        history = None if session.history is None else session.history.with_path(path)
        position = len(session.tokens) + len(path)
        try:
            ids, scaled, scores = self._sampler.draft_scores(
                logits[0], session.params, position, history, self._sharpen
            )
        except RequestPoisoned:
            return {}
        extra = torch.tensor(sorted(wanted), dtype=torch.int64, device=ids.device)
        places = torch.searchsorted(ids, extra).clamp_(max=ids.numel() - 1)
        places = places[ids[places] == extra]
        # Of the ids that no voice raises, the best of each sequence are among these.
        (best,) = likeliest(scores[None], self._num_sequences + len(places))
        columns = torch.tensor(sorted({*best, *places.tolist()}), device=ids.device)
        values = scores[columns]
        # As a draft model alone counts them: `Sampler.probabilities`.
        shares = _softmax_at(scores, columns)
        chances = shares if scaled is scores else _softmax_at(scaled, columns)
        order = torch.sort(values, descending=True, stable=True).indices
        numbers = zip(ids[columns][order].tolist(), shares[order].tolist(), chances[order].tolist(), strict=True)
        return {token: (share, chance) for token, share, chance in numbers}


def _softmax_at(values: Tensor, columns: Tensor) -> Tensor:
    """Softmax of `values` [n] at `columns`, float32."""
    rows = values[None].to(torch.float32)
    return (rows[0, columns] - rows.logsumexp(dim=1)).exp()
