"""Rules that every kind without a model keeps, whatever the prefix."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moot.core.errors import ConfigError
from moot.core.types import Proposal, SamplingParams
from moot.drafters.interface import Ask, DrafterOptions
from moot.drafters.lookup.datastore import build
from moot.drafters.lookup.ngram import NgramTable
from moot.drafters.registry import MODEL_FREE_KINDS, create, known_kinds, load_kind
from tests.waiting import GIVE_UP_S

VOCAB = 12
PARAMS = SamplingParams(temperature=0.0)
# Few distinct ids, so that matches are common; some lie outside the drafter's vocabulary (padding of a larger one).
ids = st.lists(st.integers(0, VOCAB + 2), max_size=60)
cuts = st.lists(st.integers(0, 60), max_size=4)


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[str, object]]]:
    """Name to kind and options; texts of the stores contain ids outside the vocabulary."""
    folder = tmp_path_factory.mktemp("stores")
    texts = [[1, 2, 3, 4, VOCAB, 5, 6, 1, 2, 3], [3, 3, 3, 3], [7, VOCAB + 1, 7, 8, 9, 1, 2, 4]]
    build(texts, folder / "store")
    NgramTable.build(texts).save(folder / "table.npz")
    plain: dict[str, tuple[str, dict[str, object]]] = {kind: (kind, {}) for kind in MODEL_FREE_KINDS}
    return plain | {
        "suffix recent": ("suffix", {"prefer": "recent"}),
        "suffix window": ("suffix", {"max_indexed_tokens": 9}),
        "suffix datastore": ("suffix", {"datastore": folder / "store"}),
        "suffix long matches": ("suffix", {"min_match": 3}),
        "ngram table": ("ngram", {"table": folder / "table.npz"}),
        "ngram window": ("ngram", {"max_indexed_tokens": 9}),
    }


NAMES = (
    *MODEL_FREE_KINDS, "suffix recent", "suffix window", "suffix datastore", "suffix long matches", "ngram table",
    "ngram window",
)  # fmt: skip


def proposals(kind: str, options: dict[str, object], prefix: list[int], num_tokens: int, width: int) -> list[Proposal]:
    drafter = create(kind, {"vocab_size": VOCAB, **options})
    return drafter.propose([Ask(drafter.open(prefix, PARAMS), num_tokens, width)])[0]


@pytest.mark.parametrize("name", NAMES)
@given(prefix=ids, num_tokens=st.integers(0, 9), width=st.integers(0, 4))
@settings(max_examples=150)
def test_proposals_are_always_valid(
    variants: dict[str, tuple[str, dict[str, object]]], name: str, prefix: list[int], num_tokens: int, width: int
) -> None:
    """At most `width` different chains of 1 to K ids below vocab_size, a byte for each id (C07, C20, C33)."""
    chains = proposals(*variants[name], prefix, num_tokens, width)
    assert len(chains) <= width
    assert len({chain.token_ids for chain in chains}) == len(chains)
    for chain in chains:
        assert 1 <= len(chain.token_ids) <= num_tokens
        assert all(0 <= token < VOCAB for token in chain.token_ids)
        assert len(chain.confidences) == len(chain.token_ids)
        assert all(0 <= byte <= 255 for byte in chain.confidences)


@pytest.mark.parametrize("name", NAMES)
@given(prefix=ids, cuts=cuts)
@settings(max_examples=100)
def test_extending_equals_opening_afresh(
    variants: dict[str, tuple[str, dict[str, object]]], name: str, prefix: list[int], cuts: list[int]
) -> None:
    """A proposal is a function of the prefix, however it arrived and whatever was asked for on the way."""
    kind, options = variants[name]
    drafter = create(kind, {"vocab_size": VOCAB, **options})
    bounds = sorted({0, *(min(cut, len(prefix)) for cut in cuts), len(prefix)})
    session = drafter.open([], PARAMS)
    for start, end in pairwise(bounds):
        drafter.extend(session, prefix[start:end])
        drafter.propose([Ask(session, 3, 2)])
    fresh = drafter.open(prefix, PARAMS)
    batched = drafter.propose([Ask(session, 6, 3), Ask(fresh, 6, 3)])
    assert batched[0] == batched[1] == proposals(kind, options, prefix, 6, 3)


@pytest.mark.parametrize("kind", MODEL_FREE_KINDS)
def test_repetitive_text_is_foreseen(kind: str) -> None:
    """A usefulness floor: in text that repeats itself, most proposed tokens come true."""
    text = [1, 5, 2, 8, 3, 9, 4, 6] * 12
    drafter = create(kind, {"vocab_size": VOCAB})
    session = drafter.open(text[:20], PARAMS)
    accepted = drafted = 0
    for position in range(20, 80):
        (chain,) = drafter.propose([Ask(session, 4)])[0]
        drafted += 4
        for proposed, true in zip(chain.token_ids, text[position:], strict=False):
            if proposed != true:
                break
            accepted += 1
        drafter.extend(session, text[position : position + 1])
    assert accepted >= 0.95 * drafted


@pytest.mark.parametrize("kind", MODEL_FREE_KINDS)
def test_past_the_context_limit_it_abstains_and_holds_nothing(kind: str) -> None:
    """Memory per session is bounded: past the limit what was held is freed, and no proposal comes (C21)."""
    drafter = create(kind, {"vocab_size": VOCAB, "context_limit": 32})
    session = drafter.open([1, 2, 3] * 10, PARAMS)
    chains = drafter.propose([Ask(session, 8)])[0]
    assert [len(chain.token_ids) for chain in chains] == [2]
    drafter.extend(session, [1, 2, 3])
    assert drafter.propose([Ask(session, 8)]) == [[]]
    for held in ("tokens", "learned", "rows", "automaton"):
        assert len(getattr(session, held, ())) == 0
    drafter.extend(session, [1] * 10_000)
    assert drafter.propose([Ask(session, 8)]) == [[]]


@pytest.mark.parametrize("kind", MODEL_FREE_KINDS)
def test_a_session_of_a_long_prompt_stays_small(kind: str) -> None:
    """Many sessions share a process: a prompt of 100,000 different contexts holds at most a few megabytes."""
    draw = random.Random(1)
    prefix = [draw.randrange(1000) for _ in range(100_000)]
    drafter = create(kind, {"vocab_size": 1000})
    tracemalloc.start()
    try:
        session = drafter.open(prefix, PARAMS)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert session.length == len(prefix)
    assert held_bytes < 8_000_000


def test_kinds_without_a_model_import_no_torch() -> None:
    """The router runs them in its own process, which never imports torch."""
    code = (
        "import sys; from moot.drafters.registry import MODEL_FREE_KINDS, create\n"
        "for kind in MODEL_FREE_KINDS: create(kind, {'vocab_size': 10})\n"
        "assert not {'torch', 'transformers', 'grpc'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=GIVE_UP_S)


def test_unknown_kinds_and_options_are_named() -> None:
    """Schemas are closed: a mistyped kind or option is an error that names the known ones."""
    with pytest.raises(ConfigError, match=r"unknown drafter kind sufix .*ngram, .*prompt_lookup, recycling, .*suffix"):
        create("sufix", {})
    with pytest.raises(ConfigError, match=r"unknown option of drafter kind suffix: minmatch .*min_match"):
        create("suffix", {"vocab_size": 9, "minmatch": 2})
    with pytest.raises(ConfigError, match="needs option vocab_size"):
        create("ngram", {})
    with pytest.raises(ConfigError, match="max_ngram"):
        create("prompt_lookup", {"vocab_size": 9, "max_ngram": "0"})
    with pytest.raises(ConfigError, match="'often' is not one of frequent, recent"):
        create("suffix", {"vocab_size": 9, "prefer": "often"})
    with pytest.raises(ConfigError, match="cannot open n-gram table"):
        create("ngram", {"vocab_size": 9, "table": "/nowhere/table.npz"})
    with pytest.raises(ConfigError, match="cannot open datastore"):
        create("suffix", {"vocab_size": 9, "datastore": "/nowhere"})


def test_text_and_typed_option_values_are_the_same() -> None:
    """Options come from a command line or from code."""
    spec = load_kind("prompt_lookup")
    assert isinstance(create("prompt_lookup", {"vocab_size": "12", "max_ngram": "3"}), spec.build)  # type: ignore[arg-type]
    assert issubclass(spec.options, DrafterOptions)


def test_kinds_of_other_packages_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package adds a kind through the entry point group `moot.drafters`."""
    folder = tmp_path
    (folder / "outside_kind.py").write_text(
        "from moot.drafters.interface import Kind\n"
        "from moot.drafters.lookup.prompt_lookup import PromptLookupOptions, PromptLookupDrafter\n"
        "kind = Kind('echo', PromptLookupOptions, PromptLookupDrafter)\n"
        "wrong = 3\n"
    )
    info = folder / "outside_kind-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-kind\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[moot.drafters]\necho = outside_kind:kind\nwrong = outside_kind:wrong\n")
    monkeypatch.syspath_prepend(str(folder))
    assert "echo" in known_kinds()
    drafter = create("echo", {"vocab_size": 9})
    assert drafter.propose([Ask(drafter.open([1, 2, 1], PARAMS), 1)])[0][0].token_ids == (2,)
    with pytest.raises(ConfigError, match="wrong"):
        create("wrong", {"vocab_size": 9})
