"""From samples to the table: speeds, ratios within a round, and whether speculation changed a text. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.bench.harness.intervals import Interval, ratios
from lab.bench.peers.catalogue import Peer, Variant

HEADER = (
    *("peer", "at once", "rounds", "tokens/s in all", "of its own plain"),
    *("Moot on / it, decoding", "Moot on / it, in all", "same texts as its plain"),
)
MOOT_ON = "on"
NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn: what `variant` answered to the `at_once` prompts of `round_index` in the run `run`.

    `asked`: fingerprint of the prompts and the most tokens, by which samples of another question are told apart.
    """

    run: str
    asked: str
    variant: str
    at_once: int
    round_index: int
    token_ids: tuple[tuple[int, ...], ...]
    first_s: tuple[float, ...]
    total_s: tuple[float, ...]

    @classmethod
    def of(
        cls, run: str, asked: str, variant: str, at_once: int, round_index: int, answers: Sequence[Mapping[str, Any]]
    ) -> Sample:
        return cls(
            run,
            asked,
            variant,
            at_once,
            round_index,
            tuple(tuple(answer["token_ids"]) for answer in answers),
            tuple(float(answer["first_s"]) for answer in answers),
            tuple(float(answer["total_s"]) for answer in answers),
        )

    @classmethod
    def read(cls, kept: Mapping[str, Any]) -> Sample:
        """Raises KeyError or TypeError for what is no sample."""
        ids = tuple(tuple(ids) for ids in kept["token_ids"])
        times = {name: tuple(kept[name]) for name in ("first_s", "total_s")}
        return cls(**{**kept, "token_ids": ids, **times})

    @property
    def pair(self) -> tuple[str, int, int]:
        """What two samples share that were measured in turns."""
        return self.run, self.at_once, self.round_index

    @property
    def total(self) -> float:
        """Tokens of all answers per second, from the request to the last token."""
        return sum(map(len, self.token_ids)) / max(self.total_s)

    @property
    def decoding(self) -> float:
        """Tokens after the first per second, first to last; 0 for many at once, whose prompts go between."""
        if self.at_once > 1:
            return 0.0
        seconds = max(self.total_s) - min(self.first_s)
        return sum(len(ids) - 1 for ids in self.token_ids) / seconds if seconds > 0 else 0.0


def fingerprint(prompts: Sequence[Sequence[int]], max_tokens: int) -> str:
    return hashlib.sha256(repr(([list(prompt) for prompt in prompts], max_tokens)).encode()).hexdigest()[:16]


def complete(samples: Iterable[Sample], wanted: Callable[[int], set[str]]) -> set[tuple[int, int]]:
    """(at once, round) of which one run holds all the variants that `wanted` names for so many at once."""
    found: dict[tuple[str, int, int], set[str]] = {}
    for sample in samples:
        found.setdefault(sample.pair, set()).add(sample.variant)
    return {(at_once, index) for (_, at_once, index), names in found.items() if names >= wanted(at_once)}


def texts_of(sample: Sample, stop_token_ids: Iterable[int]) -> list[list[int]]:
    """Without the end token, which some peers tell and some do not."""
    stops = set(stop_token_ids)
    return [[token_id for token_id in ids if token_id not in stops] for ids in sample.token_ids]


def rows(
    peers: Sequence[Peer], samples: Sequence[Sample], failures: Mapping[str, str], stop_token_ids: Sequence[int]
) -> list[list[object]]:
    """One for each variant and number of requests at once, and one for each peer that failed."""
    found: list[list[object]] = []
    for at_once in sorted({sample.at_once for sample in samples}):
        measured: dict[str, dict[tuple[str, int, int], Sample]] = {}
        for sample in samples:
            if sample.at_once == at_once:
                measured.setdefault(sample.variant, {})[sample.pair] = sample
        found += [
            _row(variant, at_once, measured, stop_token_ids)
            for peer in peers
            for variant in peer.variants
            if variant.name in measured
        ]
    for name, error in failures.items():
        told = " ".join(error.split())
        found.append([f"{name}: FAILED", *[NOTHING] * (len(HEADER) - 2), told[-300:]])
    return found


def _row(
    variant: Variant,
    at_once: int,
    measured: Mapping[str, Mapping[tuple[str, int, int], Sample]],
    stop_token_ids: Sequence[int],
) -> list[object]:
    mine = measured[variant.name]
    plain = measured.get(variant.plain_of or "", {})
    ours = measured.get(MOOT_ON, {}) if variant.name != MOOT_ON else {}
    return [
        variant.label,
        at_once,
        len(mine),
        f"{Interval.of([sample.total for sample in mine.values()]).median:,.1f}",
        _ratio(mine, plain, "total"),
        _ratio(ours, mine, "decoding"),
        _ratio(ours, mine, "total"),
        _same(mine, plain, stop_token_ids) if variant.plain_of else NOTHING,
    ]


def _ratio(
    top: Mapping[tuple[str, int, int], Sample], bottom: Mapping[tuple[str, int, int], Sample], speed: str
) -> str:
    shared = [
        key for key in top.keys() & bottom.keys() if getattr(top[key], speed) > 0 and getattr(bottom[key], speed) > 0
    ]
    if not shared:
        return NOTHING
    return ratios([getattr(top[key], speed) for key in shared], [getattr(bottom[key], speed) for key in shared]).text()


def _same(
    mine: Mapping[tuple[str, int, int], Sample],
    plain: Mapping[tuple[str, int, int], Sample],
    stop_token_ids: Sequence[int],
) -> str:
    pairs = [
        (one, other)
        for key in sorted(mine.keys() & plain.keys())
        for one, other in zip(texts_of(mine[key], stop_token_ids), texts_of(plain[key], stop_token_ids), strict=True)
    ]
    if not pairs:
        return NOTHING
    return f"{sum(one == other for one, other in pairs)} of {len(pairs)}"
