"""Text assembly: whole characters, stop strings, offsets, whatever the split into blocks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from moot.core.errors import ConfigError
from services.router.api.text import IncrementalText, StopStrings
from services.router.api.tokenization import TokenBytes
from tests.services.router.api.http_fakes import END, TOKENIZER, byte_fallback_tokenizer

KINDS = {"byte_level": TOKENIZER, "byte_fallback": byte_fallback_tokenizer()}


@functools.cache
def load(kind: str) -> tuple[Any, TokenBytes]:
    return KINDS[kind], TokenBytes(KINDS[kind])


TOKENS = load("byte_level")[1]


def split(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    marks = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(marks)]


def run(text: IncrementalText, blocks: Sequence[Sequence[int]]) -> tuple[str, int, str | None]:
    """Joined text, ids kept, stop string."""
    shown, kept = "", 0
    for block in blocks:
        delta = text.push(block)
        shown, kept = shown + delta.text, kept + delta.num_tokens_kept
        if delta.stopped:
            assert text.flush() == ""
            return shown, kept, delta.stop_reason
    return shown + text.flush(), kept, None


def without_incomplete_end(data: bytes) -> str:
    """The bytes as text, a character that lacks its last bytes dropped: an oracle that shares no code."""
    for missing in range(1, 4):
        tail = data[-missing:]
        if len(tail) == missing and tail[0] >= 0xC2:
            for filler in range(0x80, 0xC0):
                for length in range(1, 4):
                    try:
                        (tail + bytes([filler]) * length).decode()
                    except UnicodeDecodeError:
                        continue
                    return data[:-missing].decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


ids_of = st.lists(st.integers(0, 10_000), max_size=40)
cuts_of = st.lists(st.integers(0, 60), max_size=8)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(ids=ids_of, cuts=cuts_of, keep_offsets=st.booleans())
@example(ids=[171, 96], cuts=[], keep_offsets=False)  # byte-level: the first two bytes of a surrogate
def test_any_split_gives_the_bytes_as_text(kind: str, ids: list[int], cuts: list[int], keep_offsets: bool) -> None:
    """The joined stream is the UTF-8 of the tokens' bytes for any ids and any split, whether offsets are kept or not;
    an unfinished end is dropped."""
    _, tokens = load(kind)
    ids = [index % tokens.size for index in ids]
    assembler = IncrementalText(tokens, skip_special_tokens=False, keep_offsets=keep_offsets)
    shown, kept, _ = run(assembler, split(ids, cuts))
    assert kept == len(ids)
    assert shown == without_incomplete_end(b"".join(tokens.of(index) for index in ids))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=100)
@given(text=st.text(max_size=40), cuts=cuts_of)
def test_the_text_of_encoded_text_is_the_tokenizers_own(kind: str, skip: bool, text: str, cuts: list[int]) -> None:
    """On ids that are text, the joined stream equals tokenizer.decode of prompt and output, less the prompt's."""
    tokenizer, tokens = load(kind)
    head = tokenizer("the", add_special_tokens=False)["input_ids"]
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], END]
    options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
    whole = tokenizer.decode(head + ids, **options)[len(tokenizer.decode(head, **options)) :]
    assert run(IncrementalText(tokens, skip_special_tokens=skip), split(ids, cuts))[0] == whole


@functools.cache
def single(tokens: TokenBytes) -> dict[bytes, int]:
    return {tokens.of(index): index for index in reversed(range(tokens.size))}


def spell(tokens: TokenBytes, text: str | bytes) -> list[int]:
    """One id per byte."""
    data = text.encode() if isinstance(text, str) else text
    return [single(tokens)[bytes([byte])] for byte in data]


@settings(max_examples=300)
@given(
    text=st.text(alphabet="abé😀", max_size=24),
    stops=st.lists(st.text(alphabet="abé😀", min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
    min_tokens=st.integers(0, 10),
    include=st.booleans(),
    cuts=cuts_of,
)
def test_stop_strings_against_brute_force(
    text: str, stops: list[str], min_tokens: int, include: bool, cuts: list[int]
) -> None:
    """The stop completed by the earliest character counts, the longest of those; nothing of it leaks; what cannot
    become one any more is shown; the first min_tokens tokens complete none."""
    ids = spell(TOKENS, text)
    expected: tuple[str, int, str | None] = (text, len(ids), None)
    for end in range(1, len(text) + 1):
        num_tokens = len(text[:end].encode())
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending and num_tokens > min_tokens:
            stop = max(ending, key=len)
            expected = (text[: end if include else end - len(stop)], num_tokens, stop)
            break
    automaton = StopStrings(stops)
    assembler = IncrementalText(TOKENS, stops=automaton, min_tokens=min_tokens, include_stop_str_in_output=include)
    assert run(assembler, split(ids, cuts)) == expected


@settings(max_examples=150)
@given(text=st.text(alphabet="ab", max_size=24), stop=st.text(alphabet="ab", min_size=1, max_size=4))
def test_no_more_is_held_back_than_could_become_a_stop(text: str, stop: str) -> None:
    """After each token, exactly the longest end that begins the stop string is held back."""
    assembler, shown = IncrementalText(TOKENS, stops=StopStrings([stop])), ""
    for count, token_id in enumerate(spell(TOKENS, text), start=1):
        delta = assembler.push([token_id])
        shown += delta.text
        if delta.stopped:
            return
        held = max(size for size in range(len(stop)) if text[:count].endswith(stop[:size]))
        assert shown == text[: count - held]


def test_stop_inside_a_block_ends_text_and_ids_at_the_same_token() -> None:
    """C09: "ha ha ha ha", stop " ha ha ha", a block of many: the ids end with the token that completes the stop."""
    ids = TOKENIZER("ha ha ha ha ha ha ha", add_special_tokens=False)["input_ids"]
    delta = IncrementalText(TOKENS, stops=StopStrings([" ha ha ha"])).push(ids)
    assert (delta.text, delta.stop_reason) == ("ha", " ha ha ha")
    assert TOKENS.text(ids[: delta.num_tokens_kept], True) == "ha ha ha ha"


def test_stop_as_first_token_of_a_block_of_nine() -> None:
    """C09: a stop completed by the first token leaves one token and no text."""
    delta = IncrementalText(TOKENS, stops=StopStrings(["a"])).push(spell(TOKENS, "abbbbbbbb"))
    assert (delta.text, delta.num_tokens_kept, delta.stopped) == ("", 1, True)


def test_a_character_over_two_rounds_is_never_broken() -> None:
    """C14: an emoji whose bytes span pushes comes whole; cut by max_tokens it does not come at all."""
    ids = spell(TOKENS, "x😀é")
    text = IncrementalText(TOKENS)
    assert [text.push([index]).text for index in ids] == ["x", "", "", "", "😀", "", "é"]
    cut = IncrementalText(TOKENS)
    assert cut.push(ids[:4]).text + cut.flush() == "x"


def test_bytes_that_are_no_character_show_at_once() -> None:
    """U+FFFD stands for bytes that can never become a character, not for the text after them."""
    tokens = load("byte_fallback")[1]
    text = IncrementalText(tokens)
    assert [text.push([index]).text for index in spell(tokens, b"\xe6\x9dA\xff")] == ["", "", "�A", "�"]


def test_end_and_stop_tokens_have_no_text_unless_asked_for() -> None:
    """The token that ends the request is not part of the text, unless include_stop_str_in_output."""
    ids = spell(TOKENS, "ab.")
    ending = frozenset({ids[-1], END})
    assert IncrementalText(TOKENS, ending_token_ids=ending).push(ids).text == "ab"
    assert IncrementalText(TOKENS, ending_token_ids=ending, include_stop_str_in_output=True).push(ids).text == "ab."
    assert IncrementalText(TOKENS, ending_token_ids=ending, skip_special_tokens=False).push([END]).text == ""


def test_offsets_are_where_tokens_begin() -> None:
    """offsets[i] is a character index; bytes inside a character share the character's."""
    text = IncrementalText(TOKENS)
    text.push(spell(TOKENS, "aé"))
    text.push(spell(TOKENS, "😀b"))
    assert text.offsets == [0, 1, 1, 2, 2, 2, 2, 3]


def test_nothing_may_follow_a_stop() -> None:
    """Pushing after a stop string was completed is a mistake of the caller, not silently dropped text."""
    text = IncrementalText(TOKENS, stops=StopStrings(["a"]))
    text.push(spell(TOKENS, "a"))
    with pytest.raises(ValueError, match="ended"):
        text.push(spell(TOKENS, "b"))


def test_an_added_token_that_is_not_special_is_text() -> None:
    """Only special tokens are hidden by skip_special_tokens."""
    index = TOKENIZER.convert_tokens_to_ids("<my tool>")
    assert IncrementalText(TOKENS).push([index, END]).text == "<my tool>"
    assert IncrementalText(TOKENS, skip_special_tokens=False).push([index, END]).text == "<my tool><|im_end|>"


def test_ids_past_the_tokenizer_have_no_text() -> None:
    """A padded vocabulary's ids never break the text."""
    assert IncrementalText(TOKENS).push([TOKENS.size, TOKENS.size + 5, *spell(TOKENS, "a")]).text == "a"


def plain(vocabulary: Sequence[str], decoder: Any) -> Any:
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="a"))
    if decoder is not None:
        core.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_other_decoders_are_followed_or_refused() -> None:
    """A decoder that concatenates is followed through what it makes of a pair; one that does not is refused."""
    tokens = TokenBytes(plain(["a", "b", "##c"], decoders.WordPiece("##", cleanup=False)))
    assert [tokens.of(index) for index in range(3)] == [b" a", b" b", b"c"]
    with pytest.raises(ConfigError, match="CTC"):
        TokenBytes(plain(["a", "b", "c"], decoders.CTC(pad_token="<pad>", word_delimiter_token="|", cleanup=False)))
