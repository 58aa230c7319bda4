"""What the fault tests ask for, and how they run several requests through one fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from moot.testing.tiny_model import make_tiny_model
from tests.integration.asking import Ask, Reply, assert_same, plain
from tests.integration.whole_system import System, running

LETTERS = "abcdefgh"
STEP_DELAY = "verifier.step=delay:0.02"
"""Makes a step last as long as a large model's, so that there is a middle of an answer to break something in."""


def body(index: int = 0, max_tokens: int = 80, **fields: Any) -> dict[str, Any]:
    """Request number `index`: greedy or sampled in turn, over eight letters, so that drafters have a chance."""
    return {
        "prompt": f"{LETTERS} {index} {LETTERS}",
        "max_tokens": max_tokens,
        "temperature": 0.9 * (index % 2),
        "seed": index,
        "ignore_eos": True,
        "allowed_token_ids": list(LETTERS.encode()),
        "num_speculative_tokens": 3,
    } | fields


def chat_body(index: int = 0, max_tokens: int = 80, **fields: Any) -> dict[str, Any]:
    """The same for the chat API; such requests are the target of fault points `...@chatcmpl-*`."""
    made = body(index, max_tokens, **fields)
    return {"messages": [{"role": "user", "content": made.pop("prompt")}]} | made


_DELIVERY = frozenset({"drafters", "stream", "num_speculative_tokens"})


class Rig:
    """Reference answers of one system, made once each while it is whole."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._expected: dict[str, Reply] = {}

    @property
    def port(self) -> int:
        return self.system.router.port

    def expected(self, asked: dict[str, Any], *, chat: bool = False) -> Reply:
        """The answer with drafting off; how it is drafted and delivered must not matter, so that is left out."""
        return self.all_expected([asked], chat=chat)[0]

    def all_expected(self, bodies: Sequence[dict[str, Any]], *, chat: bool = False) -> list[Reply]:
        cores = [{name: one[name] for name in sorted(one) if name not in _DELIVERY} for one in bodies]
        missing = {key: core for core in cores if (key := repr((core, chat))) not in self._expected}
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(lambda core: plain(self.port, core, chat=chat), missing.values())
            self._expected.update(zip(missing, answers, strict=True))
        return [self._expected[repr((core, chat))] for core in cores]

    @contextmanager
    def under_way(self, bodies: Sequence[dict[str, Any]], num_tokens: int = 3) -> Iterator[list[Ask]]:
        """All of these in mid-stream; on leaving each must come to its right end."""
        expected = self.all_expected(bodies)
        asks = [self.ask(asked) for asked in bodies]
        for ask in asks:
            ask.wait_tokens(num_tokens)
        yield asks
        for ask, right in zip(asks, expected, strict=True):
            assert_same(ask.result(), right)

    def ask(self, asked: dict[str, Any], *, stream: bool = True, chat: bool = False) -> Ask:
        return Ask(self.port, asked, stream=stream, chat=chat)

    def through(self, breaks: Callable[[], Any], count: int = 2, **fields: Any) -> list[Reply]:
        """`count` streams and one whole answer, with `breaks` called in the middle of each: all must be right. Where
        this machine reads too slowly to be in the middle of an answer, a longer one has one."""
        for max_tokens in (80, 320, 1280):
            bodies = [body(index, max_tokens, **fields) for index in range(count + 1)]
            expected = self.all_expected(bodies)
            asks = [self.ask(asked, stream=index < count) for index, asked in enumerate(bodies)]
            for ask in asks[:count]:
                ask.wait_tokens(5)
            if max(len(ask.reply.token_ids) for ask in asks) < max_tokens / 2:
                break
            for ask in asks:
                ask.give_up()
        breaks()
        assert not any(ask.is_over for ask in asks), "nothing was broken in the middle"
        replies = [ask.result() for ask in asks]
        for reply, right in zip(replies, expected, strict=True):
            assert_same(reply, right)
        return replies

    def ask_right(self, index: int = 0, **fields: Any) -> Reply:
        """One more request, which must be right."""
        asked = body(index, **({"max_tokens": 40} | fields))
        reply = self.ask(asked).result()
        assert_same(reply, self.expected(asked))
        return reply


def system_rig(name: str, *, also: Sequence[str] = (), context: int = 2048, **options: Any) -> Any:
    """A fixture: the rig of a module's tests over `running(...)` with these options and a tiny model of its own.

    `also`: flags of a second router, if any. After each test the system holds nothing and has healed (conftest.py).
    """

    @pytest.fixture(scope="module")
    def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
        folder = tmp_path_factory.mktemp(name)
        model = make_tiny_model(folder / "tiny", context=context)
        with running(folder / "logs", model, **{"faults": {"verifier-0": STEP_DELAY}} | options) as system:
            if also:
                system.add_router(also)
            yield Rig(system)

    return rig
