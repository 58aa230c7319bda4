"""Drafter kinds by name. A kind is loaded when it is asked for: those without a model never import torch.

Other packages add kinds under the entry point group `moot.drafters`: the entry's name is the kind, its object a
`Kind`. Attached kinds, which run in the verifier, are added under `moot.attached_drafters`: their object is an
`AttachedKind`. Built-in names go first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

from moot.core.errors import ConfigError
from moot.drafters.interface import Drafter, Kind, parse_options

FoundT = TypeVar("FoundT")

ENTRY_POINT_GROUP = "moot.drafters"
MODEL_FREE_KINDS = ("ngram", "prompt_lookup", "recycling", "suffix")
"""Built-in kinds that need no torch: the router can run them in its own process."""
REQUEST_KINDS = ("prediction", "sibling")
"""Built-in kinds that live from what a request brings: in the router's process only."""
BUILT_IN_KINDS = (*MODEL_FREE_KINDS, *REQUEST_KINDS, "neural")
ATTACHED_GROUP = "moot.attached_drafters"
BUILT_IN_ATTACHED_KINDS = ("heads",)


def known_kinds() -> tuple[str, ...]:
    """Names of all kinds, built-in and installed, sorted."""
    return tuple(sorted({*BUILT_IN_KINDS, *(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))}))


def attached_kinds() -> tuple[str, ...]:
    """Names of all kinds that run in the verifier, built-in and installed, sorted. None of them is loaded."""
    return tuple(sorted({*BUILT_IN_ATTACHED_KINDS, *(entry.name for entry in entry_points(group=ATTACHED_GROUP))}))


def load_kind(kind: str) -> Kind[Any]:
    """The kind of this name, loaded. Raises ConfigError naming the known kinds."""
    match kind:
        case "ngram":
            from moot.drafters.lookup.ngram import NgramDrafter, NgramOptions

            return Kind("ngram", NgramOptions, NgramDrafter)
        case "prompt_lookup":
            from moot.drafters.lookup.prompt_lookup import PromptLookupDrafter, PromptLookupOptions

            return Kind("prompt_lookup", PromptLookupOptions, PromptLookupDrafter)
        case "recycling":
            from moot.drafters.lookup.recycling import RecyclingDrafter, RecyclingOptions

            return Kind("recycling", RecyclingOptions, RecyclingDrafter)
        case "suffix":
            from moot.drafters.lookup.suffix import SuffixDrafter, SuffixOptions

            return Kind("suffix", SuffixOptions, SuffixDrafter)
        case "prediction":
            from moot.drafters.request.prediction import PredictionDrafter, PredictionOptions

            return Kind("prediction", PredictionOptions, PredictionDrafter)
        case "sibling":
            from moot.drafters.request.sibling import SiblingDrafter, SiblingOptions

            return Kind("sibling", SiblingOptions, SiblingDrafter)
        case "neural":
            from moot.drafters.neural.neural import NeuralDrafter, NeuralOptions

            return Kind("neural", NeuralOptions, lambda options: NeuralDrafter(options, make_stage))
    if (found := installed(kind, ENTRY_POINT_GROUP, Kind)) is not None:
        return found
    raise ConfigError(f"unknown drafter kind {kind} (known: {', '.join(known_kinds())})")


def create(kind: str, options: Mapping[str, object], fingerprint: str = "") -> Drafter[Any]:
    """A drafter of `kind`. Values of `options` may be typed or text; `vocab_size` is an option of every kind.

    `fingerprint`: of the tokenizer whose ids it will be told; empty: not known. Raises ConfigError naming what is
    wrong: the kind, an unknown, missing or bad option, a file that cannot be read, or one of another tokenizer's ids.
    """
    spec = load_kind(kind)
    drafter = spec.build(parse_options(spec.options, kind, options))
    if fingerprint and drafter.tokenizer_fingerprint not in ("", fingerprint):
        found = drafter.tokenizer_fingerprint
        raise ConfigError(f"what drafter kind {kind} was given has tokenizer {found}, what is served has {fingerprint}")
    return drafter


def make_stage(text: str, vocab_size: int, fingerprint: str) -> Drafter[Any]:
    """The stages that `kind[~option=value]...[+kind...]` names, the cheapest first.

    A kind that has stages itself is fed by all before it; of kinds without, the first that has something to say is
    heard. `fingerprint`: of the tokenizer that all of them must share. Raises ConfigError.
    """
    before, _, last = text.rpartition("+")
    kind, *pairs = last.split("~")
    if kind in REQUEST_KINDS:
        raise ConfigError(f"kind {kind} cannot be a stage: it lives from what a request brings")
    options: dict[str, object] = {"vocab_size": vocab_size}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise ConfigError(f"option stages: {last!r} is not kind[~option=value]...")
        options[name] = value
    takes_stages = any(field.name == "stages" for field in dataclasses.fields(load_kind(kind).options))
    if before and takes_stages:
        return create(kind, options | {"stages": before}, fingerprint)
    drafter = create(kind, options, fingerprint)
    if not before:
        return drafter
    from moot.drafters.neural.stages import FirstOf

    return FirstOf(make_stage(before, vocab_size, fingerprint), drafter)


def installed(kind: str, group: str, cls: type[FoundT]) -> FoundT | None:
    """The object that the entry point `kind` of `group` names, None without one. Raises ConfigError where it is no
    `cls`."""
    for entry in entry_points(group=group, name=kind):
        found = entry.load()
        if not isinstance(found, cls):
            raise ConfigError(f"entry point {kind} of group {group} is not a {cls.__name__}")
        return found
    return None
