"""What is recorded is what was said: texts and proposals survive the file, an interruption, and a smaller question."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lab.replay.folder import drafter_path, open_recording
from lab.replay.proposals import ProposalRecord, load_record, record_text, save_record, shortened
from lab.replay.recorded_texts import load_texts, save_texts
from lab.replay.recorder import Asking, record_drafter
from lab.replay.replay_prompts import read_prompts
from moot.core.errors import ConfigError
from moot.core.types import Proposal
from moot.drafters.interface import Ask, parse_entries
from moot.drafters.registry import create
from tests.lab.replay.recordings import DRAFTERS, VOCAB, made_up_texts, make_recording, quiet


def test_texts_and_proposals_come_back_from_their_files(tmp_path: Path) -> None:
    """Whatever was recorded is read again as it was, rows without candidates and texts of one token included."""
    texts = made_up_texts()
    texts.append(replace(texts[0], name="one", output_token_ids=texts[0].output_token_ids[:1], top_candidates=()))
    save_texts(tmp_path / "texts.npz", texts)
    again = load_texts(tmp_path / "texts.npz")
    assert again[:-1] == texts[:-1]
    assert again[-1] == replace(texts[-1], top_candidates=((),))
    recording = make_recording(tmp_path, made_up_texts(), width=3)
    for id_, record in recording.records.items():
        save_record(tmp_path / "again.npz", record)
        assert load_record(tmp_path / "again.npz") == record
        assert record.facts.drafter_id == id_
        assert record.num_places == sum(text.num_places for text in recording.texts)
        assert len(record.seconds_of(0)) == recording.texts[0].num_places


def test_a_session_sees_the_prefix_and_nothing_else(tmp_path: Path) -> None:
    """At every place the proposals are those of a session that has just been opened with the whole prefix."""
    texts = made_up_texts(3)
    recording = make_recording(tmp_path, texts, ("suffix", "prompt_lookup", "ngram"), width=2)
    for entry in parse_entries(("suffix", "prompt_lookup", "ngram"), "--drafters"):
        drafter = create(entry.kind, {"vocab_size": VOCAB})
        for index, text in enumerate(texts):
            places = recording.records[entry.drafter_id].of_text(index)
            for place in range(0, text.num_places, 7):
                session = drafter.open((*text.prompt_token_ids, *text.output_token_ids[: place + 1]), text.params)
                (chains,) = drafter.propose([Ask(session, 8, 2)])
                assert [one.token_ids for one in places[place]] == [chain.token_ids for chain in chains]
                assert [one.confidences for one in places[place]] == [chain.confidences for chain in chains]


@pytest.mark.parametrize("entry", DRAFTERS)
def test_a_smaller_question_has_the_head_of_the_answer(entry: str) -> None:
    """Asked for fewer tokens or fewer chains, every built-in kind says the beginning of what it says: so that one
    recording serves every smaller K and width."""
    (parsed,) = parse_entries([entry], "--drafters")
    text = made_up_texts(1, seed=4)[0]
    drafter = create(parsed.kind, {"vocab_size": VOCAB, **parsed.options})
    session = drafter.open(text.prompt_token_ids, text.params)
    compared = 0
    for place in range(text.num_places):
        drafter.extend(session, text.output_token_ids[place : place + 1], text.top_candidates[place : place + 1])

        def ask(num_tokens: int, width: int) -> list[Proposal]:
            (chains,) = drafter.propose([Ask(session, num_tokens, width)])
            return chains

        whole = ask(8, 4)
        for num_tokens, width in ((8, 1), (3, 4), (1, 2), (5, 1)):
            assert ask(num_tokens, width) == shortened(whole, num_tokens, width)
            compared += len(whole) > 1
    assert compared or entry == "short=prompt_lookup:max_ngram=1"


def test_an_interrupted_recording_goes_on(tmp_path: Path) -> None:
    """What was recorded of a drafter stays; only the texts that are missing are asked for; the whole is the same."""
    texts = made_up_texts()
    whole = make_recording(tmp_path / "whole", texts, ("suffix",))
    part = ProposalRecord(whole.records["suffix"].facts)
    drafter = create("suffix", {"vocab_size": VOCAB})
    for text in texts[:2]:
        record_text(drafter, text, part)
    save_record(drafter_path(tmp_path / "part", "suffix"), part)
    (entry,) = parse_entries(["suffix"], "--drafters")
    again = record_drafter(tmp_path / "part", entry, texts, VOCAB, Asking(8, 1), quiet)
    assert [again.of_text(i) for i in range(6)] == [whole.records["suffix"].of_text(i) for i in range(6)]
    assert list(again.told_s[: part.num_places]) == list(part.told_s)


def test_a_drafter_that_learns_from_other_requests_is_recorded_anew(tmp_path: Path) -> None:
    """Recycling with a shared table: an interrupted recording starts over, as its sessions depend on those before."""
    texts = made_up_texts()
    (entry,) = parse_entries(["recycling:shared_rows=64"], "--drafters")
    whole = record_drafter(tmp_path / "whole", entry, texts, VOCAB, Asking(8, 1), quiet)
    part = record_drafter(tmp_path / "part", entry, texts[:3], VOCAB, Asking(8, 1), quiet)
    assert part.num_texts == 3
    again = record_drafter(tmp_path / "part", entry, texts, VOCAB, Asking(8, 1), quiet)
    assert [again.of_text(i) for i in range(6)] == [whole.of_text(i) for i in range(6)]
    assert [whole.of_text(i) for i in range(6)] != [
        make_recording(tmp_path / "own", texts, ("recycling",)).records["recycling"].of_text(i) for i in range(6)
    ]


def test_another_question_is_not_mixed_into_a_recording(tmp_path: Path) -> None:
    """The same id with other options, K or width is refused; so is a replay of a drafter that is not done."""
    texts = made_up_texts()
    make_recording(tmp_path, texts, ("suffix",))
    for wrong, asking in (("suffix:min_match=2", Asking(8, 1)), ("suffix", Asking(4, 1)), ("suffix", Asking(8, 2))):
        (entry,) = parse_entries([wrong], "--drafters")
        with pytest.raises(ConfigError, match="suffix was recorded as"):
            record_drafter(tmp_path, entry, texts, VOCAB, asking, quiet)
    (entry,) = parse_entries(["ngram"], "--drafters")
    record_drafter(tmp_path, entry, texts[:3], VOCAB, Asking(8, 1), quiet)
    with pytest.raises(ConfigError, match="ngram has not answered all texts"):
        open_recording(tmp_path)
    assert list(open_recording(tmp_path, ["suffix"]).records) == ["suffix"]
    with pytest.raises(ConfigError, match="no drafter nobody in .* there is ngram, suffix"):
        open_recording(tmp_path, ["nobody"])


def test_prompts_are_chosen_by_the_end_of_their_ids_and_mixed(tmp_path: Path) -> None:
    """Held-out prompts only, one of each category in turn; the eight MT-bench categories count as one."""
    lines = [
        {"question_id": number, "category": category, "turns": [f"q{number}", "again"]}
        for number, category in ((7, "qa"), (17, "qa"), (27, "coding"), (37, "math"), (38, "rag"), (47, "rag"))
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    chosen = read_prompts(path, ("7",))
    assert [prompt.name for prompt in chosen] == ["7", "27", "47", "17", "37"]
    assert [prompt.group for prompt in chosen] == ["qa", "mt_bench", "rag", "qa", "mt_bench"]
    assert chosen[0].text == "q7"
    assert [prompt.name for prompt in read_prompts(path, ("7",), 2)] == ["7", "27"]
    assert len(read_prompts(path)) == 6
    with pytest.raises(ConfigError, match="no prompt"):
        read_prompts(path, ("9",))
    path.write_text("{}\n")
    with pytest.raises(ConfigError, match="no prompts in"):
        read_prompts(path)
