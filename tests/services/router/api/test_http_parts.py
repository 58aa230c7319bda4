"""The parts of the HTTP front on their own: keys, admission, tokenizing, slow bodies, imports."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moot.core.errors import (
    ConfigError,
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    NoCapacity,
    RateLimited,
    Unauthenticated,
)
from moot.runtime.metrics import Metrics
from services.router.api.admission import Admission
from services.router.api.auth import ApiKeys, key_hash
from services.router.api.error_responses import ClientGone
from services.router.api.http.endpoint import EventStream
from services.router.api.http.http_server import serve_http
from services.router.api.settings import HttpSettings
from services.router.api.tokenization import PromptTokenizer
from tests.services.router.api.http_fakes import COMPLETIONS, TOKENIZER, byte_level_tokenizer, live_server
from tests.waiting import GIVE_UP_S


def test_keys_are_known_by_hash_only(tmp_path: Path) -> None:
    """From keys, hashes or a file; the object holds no key; two sources join."""
    path = tmp_path / "hashes"
    path.write_text(f"# ours\n\n{key_hash('two').upper()}\n")
    keys = ApiKeys.from_keys(["one"]) | ApiKeys.from_file(path)
    assert keys.caller("Bearer one") == key_hash("one")
    assert keys.caller("bearer  two ") == key_hash("two")
    assert "one" not in repr(vars(keys))
    with pytest.raises(Unauthenticated):
        keys.caller(f"Bearer {key_hash('one')}")


@pytest.mark.parametrize("text", ["", "# nothing\n", "short\n", "g" * 64])
def test_a_file_without_hashes_is_an_error(tmp_path: Path, text: str) -> None:
    """A mistake in the key file must not open the server to everybody."""
    path = tmp_path / "hashes"
    path.write_text(text)
    with pytest.raises(ConfigError):
        ApiKeys.from_file(path)
    with pytest.raises(ConfigError):
        ApiKeys.from_file(tmp_path / "missing")


async def test_admission_counts_and_gives_back() -> None:
    """Refusals take nothing; every place comes back when the ticket closes, also after an error."""
    settings = HttpSettings(served_model_names=("tiny",), max_choices_in_flight=4, max_choices_per_key=3)
    admission = Admission(settings, Metrics())
    with admission.enter("a") as first:
        first.grow(3)
        with pytest.raises(RateLimited):
            admission.enter("a")
        with admission.enter("b") as second:
            with pytest.raises(NoCapacity):
                second.grow(2)
            assert admission.num_in_flight == 4
        assert not await admission.wait_idle(0.01)
    with pytest.raises(KeyError), admission.enter("a"):
        raise KeyError
    assert admission.num_in_flight == 0
    assert await admission.wait_idle(0.01)
    admission.draining = True
    with pytest.raises(Draining):
        admission.enter("c")


async def test_tokenizing_has_a_deadline_and_a_bound() -> None:
    """C22: past the deadline the request fails; a text that cannot fit is not even tokenized."""
    prompts = PromptTokenizer(TOKENIZER, HttpSettings(tokenize_timeout_s=0, tokenize_threads=1, max_prompt_bytes=1000))
    with pytest.raises(DeadlineExceeded):
        await prompts.encode(["hello"], add_special_tokens=True, context_limit=100, param="prompt")
    longest = prompts.tokens.longest_token_bytes
    for size, limit in ((10 * longest + 1, 10), (1001, 10**6)):
        with pytest.raises(ContextLengthExceeded, match=f"{size} bytes"):
            await prompts.encode(["a" * size], add_special_tokens=True, context_limit=limit, param="prompt")
    prompts.close()


async def test_a_tokenizer_without_chat_template() -> None:
    """The chat endpoint says what to use instead."""
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = None
    prompts = PromptTokenizer(tokenizer, HttpSettings(tokenize_timeout_s=GIVE_UP_S, max_prompt_bytes=1000))
    turn = {"add_generation_prompt": True, "continue_final_message": False}
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        await prompts.encode_chat([{"role": "user", "content": "a"}], **turn, context_limit=100, param="messages")
    prompts.close()


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    """The body has a deadline, after which the place is free again."""
    settings = HttpSettings(served_model_names=("tiny",), body_timeout_s=0.1)
    with live_server(server={"settings": settings}) as live:
        with live.connect(COMPLETIONS, {"prompt": "a"}, num_sent=1) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 504")
        assert live.app.state.front.admission.num_in_flight == 0


async def test_a_stream_gives_up_a_reader_that_takes_nothing() -> None:
    """By its own clock, whatever the server beneath it does about the connection."""

    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    stream = EventStream(send, 0.01)
    with pytest.raises(ClientGone):
        await stream.close()
    stream.release()


def test_a_taken_port_is_a_sentence() -> None:
    """Not a traceback, and not an exit from inside the server."""
    with live_server() as live:
        port = int(live.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            asyncio.run(serve_http(live.app, "127.0.0.1", port, stop=asyncio.Event(), drain_timeout_s=1))


def test_the_front_needs_no_torch() -> None:
    """The router's image has none; using a tokenizer must not load it either."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from tests.services.router.api.http_fakes import *;"
        "import services.router.api.tokenization as t;"
        "t.TokenBytes(byte_level_tokenizer()); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(Path(__file__).parents[4])], check=True, timeout=GIVE_UP_S)


def test_any_module_of_the_router_can_be_imported_first() -> None:
    """No module works only because another one happened to be imported before it."""
    code = (
        "import importlib, pkgutil, sys, services.router as package\n"
        "for found in pkgutil.walk_packages(package.__path__, 'services.router.'):\n"
        "    for name in [name for name in sys.modules if name.startswith('services.')]:\n"
        "        del sys.modules[name]\n"
        "    if not found.name.endswith('__main__'):\n"
        "        importlib.import_module(found.name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=GIVE_UP_S)
