"""Drafter kinds by name. A kind is loaded when it is asked for: those without a model never import torch.

Other packages add kinds under the entry point group `moot.proposers`: the entry's name is the kind, its object a
`Kind`. Built-in names go first.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from moot.core.errors import ConfigError
from moot.proposers.base import Proposer
from moot.proposers.options import parse_options
from moot.proposers.spec import Kind

ENTRY_POINT_GROUP = "moot.proposers"
MODEL_FREE_KINDS = ("ngram", "prompt_lookup", "recycling", "suffix")
"""Built-in kinds that need no torch: the router can run them in its own process."""
REQUEST_KINDS = ("prediction", "sibling")
"""Built-in kinds that live from what a request brings: in the router's process only."""
MODEL_KINDS = ("neural", "superposed")
"""Built-in kinds with a draft model of their own: their tokenizer is the model's."""
BUILT_IN_KINDS = (*MODEL_FREE_KINDS, *REQUEST_KINDS, *MODEL_KINDS)


def known_kinds() -> tuple[str, ...]:
    """Names of all kinds, built-in and installed, sorted."""
    return tuple(sorted({*BUILT_IN_KINDS, *(entry.name for entry in _installed())}))


def load_kind(kind: str) -> Kind[Any]:
    """Raises ConfigError naming the known kinds."""
    match kind:
        case "ngram":
            from moot.proposers.ngram import NgramOptions, NgramProposer

            return Kind("ngram", NgramOptions, NgramProposer)
        case "prompt_lookup":
            from moot.proposers.prompt_lookup import PromptLookupOptions, PromptLookupProposer

            return Kind("prompt_lookup", PromptLookupOptions, PromptLookupProposer)
        case "recycling":
            from moot.proposers.recycling import RecyclingOptions, RecyclingProposer

            return Kind("recycling", RecyclingOptions, RecyclingProposer)
        case "suffix":
            from moot.proposers.suffix import SuffixOptions, SuffixProposer

            return Kind("suffix", SuffixOptions, SuffixProposer)
        case "prediction":
            from moot.proposers.prediction import PredictionOptions, PredictionProposer

            return Kind("prediction", PredictionOptions, PredictionProposer)
        case "sibling":
            from moot.proposers.sibling import SiblingOptions, SiblingProposer

            return Kind("sibling", SiblingOptions, SiblingProposer)
        case "neural":
            from moot.proposers.neural import NeuralOptions, NeuralProposer

            return Kind("neural", NeuralOptions, NeuralProposer)
        case "superposed":
            from moot.proposers.superposed import SuperposedOptions, SuperposedProposer

            return Kind("superposed", SuperposedOptions, SuperposedProposer)
    for entry in _installed():
        if entry.name == kind:
            found = entry.load()
            if not isinstance(found, Kind):
                raise ConfigError(f"entry point {kind} of group {ENTRY_POINT_GROUP} is not a Kind")
            return found
    raise ConfigError(f"unknown drafter kind {kind} (known: {', '.join(known_kinds())})")


def create(kind: str, options: Mapping[str, object], fingerprint: str = "") -> Proposer[Any]:
    """A proposer of `kind`. Values of `options` may be typed or text; `vocab_size` is an option of every kind.

    `fingerprint`: of the tokenizer whose ids it will be told; empty: not known. Raises ConfigError naming what is
    wrong: the kind, an unknown, missing or bad option, a file that cannot be read, or one of another tokenizer's ids.
    """
    spec = load_kind(kind)
    proposer = spec.build(parse_options(spec.options, kind, options))
    if fingerprint and proposer.tokenizer_fingerprint not in ("", fingerprint):
        found = proposer.tokenizer_fingerprint
        raise ConfigError(f"what drafter kind {kind} was given has tokenizer {found}, what is served has {fingerprint}")
    return proposer


def _installed() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=ENTRY_POINT_GROUP))
