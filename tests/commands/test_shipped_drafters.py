"""The drafters that come with the package or the repository: they are there, small, described, and propose."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.replay.recorder import num_bytes_of
from moot.commands.system import DEMO_DRAFTER_SET
from moot.core.errors import ConfigError
from moot.core.types import SamplingParams
from moot.drafters.attached.recurrent_head import RecurrentHead, embed
from moot.drafters.interface import Ask, DrafterEntry, parse_entries
from moot.drafters.registry import create
from moot.shipped import PACKAGED, PREFIX, WORKSHOP, locate, shipped_drafters

NAMES = tuple(name for name, folder in shipped_drafters().items() if folder.parent in (PACKAGED, WORKSHOP))
PROPOSING = tuple(name for name in NAMES if not name.startswith("heads"))
FIELDS = {"neural": "model", "ngram": "table", "suffix": "datastore"}
MOST_PACKAGED_BYTES = 10_000_000
MOST_BYTES = 40_000_000
VOCAB_SIZE = 49_152
FINGERPRINT = "2f1659094c0c97bb16ea4fb76b234dac2809218d2e05a81ae0ba20dd59758d6e"
"""Of SmolLM2's tokenizer."""
BEGIN_OF_TURN = 1
"""Its <|im_start|>."""


def entry_of(name: str) -> DrafterEntry:
    """A shipped drafter as a person names it on a command line, and what it needs to know of its target."""
    kind = name.partition("-")[0]
    (entry,) = parse_entries([f"t={kind}:{FIELDS[kind]}={PREFIX}{name}"], "--drafters")
    needs = {"device": "cpu"} if kind == "neural" else {"vocab_size": str(VOCAB_SIZE)}
    return dataclasses.replace(entry, options=entry.options | needs)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    """Ids as the target writes them."""
    tokens = np.load(locate("shipped@suffix-smollm2-135m") / "tokens.npy", mmap_mode="r")
    return [int(token) for token in tokens[1:9]]


def test_all_are_there_and_small() -> None:
    """Whole files and no links. The package has those that a default uses and no other, and stays small."""
    used = {
        option.removeprefix(PREFIX)
        for entry in parse_entries(DEMO_DRAFTER_SET, "--drafters")
        for option in entry.options.values()
        if option.startswith(PREFIX)
    }
    assert {folder.parent.name for folder in PACKAGED.glob("*/README.md")} == used
    assert {name.partition("-")[0] for name in NAMES} == {"heads", "neural", "ngram", "suffix"}
    packaged, workshop = ([path for path in top.rglob("*") if not path.is_dir()] for top in (PACKAGED, WORKSHOP))
    assert not any(path.is_symlink() for path in (*packaged, *workshop))
    assert sum(path.stat().st_size for path in packaged) <= MOST_PACKAGED_BYTES
    assert sum(path.stat().st_size for path in (*packaged, *workshop)) <= MOST_BYTES


def test_a_drafter_put_under_the_cache_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a folder of the repository's is copied to if only the package is there; the package's own goes first."""
    monkeypatch.setenv("MOOT_CACHE", str(tmp_path))
    mine = tmp_path / "drafters" / "suffix-mine"
    mine.mkdir(parents=True)
    (mine / "README.md").write_text("mine")
    assert locate("shipped@suffix-mine") == mine
    own = tmp_path / "drafters" / "suffix-smollm2-135m"
    own.mkdir()
    (own / "README.md").write_text("another")
    assert locate("shipped@suffix-smollm2-135m").parent == PACKAGED


@pytest.mark.parametrize("name", NAMES)
def test_its_card_says_how_it_was_made(name: str) -> None:
    """Data, steps, seed, acceptance, license and the command, and nothing of the machine that made it."""
    card = (locate(PREFIX + name) / "README.md").read_text()
    assert "Apache-2.0" in card
    assert "ends in 7" in card
    assert re.search(rf"^    moot (train|index) .*--out {name}$", card, re.MULTILINE)
    assert not re.search(r"/root|/home|/tmp", card)
    assert re.search(r"mean acceptance length, K = 8 \| [12]\.\d+", card)
    assert re.search(r"\| text: settings: seed \| \d+ \|", card)
    assert re.search(r"\| positions \| \d{7} \|", card)
    if name.startswith(("heads", "neural")):
        assert re.search(r"\| steps \| \d+ \|", card)


@pytest.mark.parametrize("name", PROPOSING)
def test_it_proposes(name: str, prompt: list[int]) -> None:
    """Named `shipped@NAME` it loads without its target, knows its tokenizer and proposes ids of its vocabulary; its
    bytes are counted."""
    entry = entry_of(name)
    assert num_bytes_of(entry) > 1_000_000
    drafter = create(entry.kind, entry.options, FINGERPRINT)
    assert drafter.tokenizer_fingerprint == FINGERPRINT
    ((chain,),) = drafter.propose([Ask(drafter.open(prompt, SamplingParams()), 8)])
    assert 1 <= len(chain.token_ids) <= 8
    assert all(0 <= token < VOCAB_SIZE for token in chain.token_ids)
    assert all(0 <= byte <= 255 for byte in chain.confidences)


@pytest.mark.parametrize("name", PROPOSING)
def test_another_tokenizer_is_refused(name: str) -> None:
    """Where other ids are served it never starts: its proposals would be noise."""
    entry = entry_of(name)
    with pytest.raises(ConfigError, match=FINGERPRINT):
        create(entry.kind, entry.options, "0" * 64)


def test_the_head_steps() -> None:
    """The recurrent head loads, says whose it is, and its outputs are distinct ids of the vocabulary; any state and
    token give finite logits."""
    head, config = RecurrentHead.load(locate("shipped@heads-smollm2-135m"))
    assert config["tokenizer_fingerprint"] == FINGERPRINT
    ids = head.get_buffer("token_ids")
    assert len(ids.unique()) == len(ids) == head.shape.vocab
    assert 0 <= int(ids.min()) <= int(ids.max()) < VOCAB_SIZE
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(64, head.shape.state, generator=generator).to(torch.bfloat16)
    states = torch.randn(3, head.shape.state, generator=generator)
    rows = torch.randn(head.shape.vocab, head.shape.state, generator=generator).to(torch.bfloat16)
    with torch.inference_mode():
        states = head.advance(states, embed(table, torch.zeros(3, head.shape.tokens, dtype=torch.int64)))
        logits = head.logits(states, rows)
    assert logits.shape == (3, head.shape.vocab + 1)
    assert bool(logits.isfinite().all())


def test_the_heads_ids_are_ordered_by_frequency() -> None:
    """The first ids are those that the target wrote most: of its answers in the datastore they hold more than any other
    so many ids do, within a hundredth."""
    head, _ = RecurrentHead.load(locate("shipped@heads-smollm2-135m"))
    ids = head.get_buffer("token_ids").numpy()
    tokens = np.load(locate("shipped@suffix-smollm2-135m") / "tokens.npy")
    counts = np.bincount(tokens[tokens < VOCAB_SIZE], minlength=VOCAB_SIZE)
    best = np.sort(counts)[::-1]
    for number in (256, 2048, 4096):
        assert counts[ids[:number]].sum() >= 0.99 * best[:number].sum()


def test_the_datastore_holds_answers_alone() -> None:
    """What prompts and templates are made of is not in it: no id that opens a turn."""
    folder = locate("shipped@suffix-smollm2-135m")
    assert not np.any(np.load(folder / "tokens.npy") == BEGIN_OF_TURN)
    assert json.loads((folder / "meta.json").read_text())["tokenizer"] == FINGERPRINT


def test_names_that_are_none_are_refused(tmp_path: Path) -> None:
    """An unknown name lists those there are; nothing else is taken for one."""
    with pytest.raises(ConfigError, match="ngram-smollm2-135m"):
        locate("shipped@nothing")
    with pytest.raises(ConfigError, match="shipped@../drafters"):
        locate("shipped@../drafters/ngram-smollm2-135m")
    assert locate(tmp_path) == tmp_path
    assert locate("org/name") == Path("org/name")
