"""Token ids to text for one choice, incrementally: whole characters, no beginning of a stop string, O(1) per token.

Rules. The text is the tokens' bytes as UTF-8; bytes that can never become a character show as U+FFFD, one for each
maximal invalid part; a character that is still incomplete when the output ends is dropped. Of several stop strings the
one completed first counts, of those completed by the same character the longest. The first `min_tokens` tokens complete
no stop string, though one may begin in their text: as for end tokens, which are masked until `min_tokens` tokens are
out, the token after them is the first that can end the request. The token that ends it (end or stop token) has no text
unless `include_stop_str_in_output`. The result depends on the ids alone, never on how they were split into pushes.

Stop strings are found character by character by Aho and Corasick's automaton (`StopStrings`).
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

from services.router.api.tokenization import TokenBytes
from services.router.generation.request_types import GenerationRequest, TextDelta

START = 0
"""State before any character."""


class StopStrings:
    """An immutable automaton over the stop strings of one request, shared by its choices.

    A state stands for the longest end of the text so far that begins a stop string. Per state: `matched[state]` is the
    longest stop string that ends here (None: none does), `held[state]` how many last characters may still become
    part of one.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.matched: list[str | None] = [None]
        self.held: list[int] = [0]
        depth = [0]
        for stop in stops:
            state = START
            for char in stop:
                if char not in self._next[state]:
                    self._next[state][char] = len(self._next)
                    self._next.append({})
                    self.matched.append(None)
                    depth.append(depth[state] + 1)
                state = self._next[state][char]
            self.matched[state] = stop
        self._fallback = [START] * len(self._next)
        self.held = [0] * len(self._next)
        queue = deque(self._next[START].values())
        for state in queue:
            self.held[state] = depth[state] if self._next[state] else 0
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                fallback = self._fallback[child] = self.step(self._fallback[state], char)
                self.matched[child] = self.matched[child] or self.matched[fallback]
                self.held[child] = depth[child] if self._next[child] else self.held[fallback]
                queue.append(child)

    def __bool__(self) -> bool:
        return len(self._next) > 1

    def step(self, state: int, char: str) -> int:
        """The state after `char`: amortised constant time, because every fallback undoes an earlier step down."""
        while state != START and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, START)


REPLACEMENT = "\ufffd"


class IncrementalText:
    """The text of one choice: the TextAssembler of the router.

    `ending_token_ids`: ids that end this request. `offsets[i]`: where in the text the i-th kept token begins, in
    characters; a token that begins inside a character begins where that character does. Without `keep_offsets` they
    may be missing.
    """

    def __init__(
        self,
        tokens: TokenBytes,
        *,
        stops: StopStrings | None = None,
        min_tokens: int = 0,
        ending_token_ids: frozenset[int] = frozenset(),
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
        keep_offsets: bool = True,
    ) -> None:
        self._tokens = tokens
        self._stops = stops if stops is not None else StopStrings()
        self._min_tokens = min_tokens
        self._include_stop = include_stop_str_in_output
        hidden = tokens.special_token_ids if skip_special_tokens else frozenset()
        # Without stop strings and offsets nobody asks which token a character came from.
        self._whole = not self._stops and not keep_offsets
        self._silent = hidden if include_stop_str_in_output else hidden | ending_token_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._state = START
        self._held = ""
        self._num_chars = 0
        self._stopped = False
        self.offsets: list[int] = []

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        tokens: TokenBytes,
        end_token_ids: frozenset[int],
        stops: StopStrings | None = None,
    ) -> IncrementalText:
        """Made for one choice. `end_token_ids`: the model's; `stops`: of its stop strings, where they are shared."""
        return cls(
            tokens,
            stops=StopStrings(request.stop_strings) if stops is None else stops,
            min_tokens=request.params.min_tokens,
            ending_token_ids=request.params.ending_token_ids(end_token_ids),
            skip_special_tokens=request.skip_special_tokens,
            include_stop_str_in_output=request.include_stop_str_in_output,
            keep_offsets=request.params.logprobs is not None,
        )

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the next ids. Raises ValueError after a stop string was completed."""
        if self._stopped:
            raise ValueError("the text has ended with a stop string")
        if self._whole:
            return TextDelta(self._decoder.decode(b"".join(map(self._piece, token_ids))), len(token_ids))
        released: list[str] = []
        for kept, token_id in enumerate(token_ids, start=1):
            self.offsets.append(self._num_chars)
            chars = self._decoder.decode(self._piece(token_id))
            self._num_chars += len(chars)
            if not self._stops:
                released.append(chars)
                continue
            text, stop = self._take(chars)
            released.append(text)
            if stop is not None:
                self._stopped = True
                return TextDelta("".join(released), kept, stopped=True, stop_reason=stop)
        return TextDelta("".join(released), len(token_ids))

    def flush(self) -> str:
        """Release the held-back tail, at an end without a stop string. Bytes of an incomplete character are dropped."""
        tail, self._held = self._held, ""
        pending = self._decoder.getstate()[0]
        self._decoder.reset()
        # Python's decoder waits for the third byte of a surrogate, which is no character whatever comes.
        if pending[:1] == b"\xed" and pending[1:2] >= b"\xa0":
            tail += REPLACEMENT * len(pending)
        return "" if self._stopped else tail

    def _piece(self, token_id: int) -> bytes:
        return b"" if token_id in self._silent else self._tokens.of(token_id)

    def _take(self, chars: str) -> tuple[str, str | None]:
        """Text to release after one token's `chars`, and the stop string they complete."""
        may_stop = len(self.offsets) > self._min_tokens
        text = self._held + chars
        begin = len(self._held)
        for index, char in enumerate(chars):
            self._state = self._stops.step(self._state, char)
            stop = self._stops.matched[self._state]
            if stop is not None and may_stop:
                end = begin + index + 1
                self._held = ""
                return text[: end if self._include_stop else end - len(stop)], stop
        held = 0 if self._include_stop else self._stops.held[self._state]
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None
