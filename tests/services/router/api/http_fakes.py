"""What the tests of the HTTP front share: tiny tokenizers, a scripted generator, a live server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import queue
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from moot.core.errors import MootError
from moot.core.types import FinishReason, ModelInfo, TokenLogprobs
from moot.runtime.metrics import Metrics
from services.router.api.auth import ApiKeys
from services.router.api.http.app import create_app
from services.router.api.http.http_server import serve_http
from services.router.api.settings import HttpSettings
from services.router.generation.request_types import (
    DrafterMetrics,
    GenerationChunk,
    GenerationMetrics,
    GenerationRequest,
    Places,
    TextAssembler,
)
from tests.waiting import GIVE_UP_S

CORPUS = [
    "the moot debates a proposal before somebody decides",
    "several drafters propose the next tokens and the target model decides",
    "ha ha ha ha ha, naïve café, Zürich, déjà vu, 東京, привет, 😀 👩‍👩‍👧 🎉",
] * 3
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and loop.first %}"
    "{{ raise_exception('an assistant cannot begin') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>"]
END = 1
"""The id of <|im_end|> in both tokenizers."""


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


@dataclass(slots=True)
class StaticFrontState:
    """A FrontState whose values its owner sets."""

    info: ModelInfo | None
    refused_with: MootError | None = None
    drafters: frozenset[str] | None = None
    room: Places | None = None

    def model_info(self) -> ModelInfo | None:
        return self.info

    def refusal(self) -> MootError | None:
        return self.refused_with

    def drafter_ids(self) -> frozenset[str] | None:
        return self.drafters

    def places(self) -> Places | None:
        return self.room

    def shortage(self) -> MootError | None:
        return None


def byte_level_tokenizer() -> Any:
    """GPT-2 and SmolLM2 style: every byte is a token, some merges, one added token that is not special."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    core.add_tokens([AddedToken("<my tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=SPECIAL[1], chat_template=CHAT_TEMPLATE)


def byte_fallback_tokenizer() -> Any:
    """Llama 2 style: spaces as U+2581, unknown characters as byte tokens, a leading space stripped."""
    pieces = SPECIAL + ["<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", *"abcdehimnorstuv", "▁ha", "▁t", "▁th", "▁the"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens([*SPECIAL, "<unk>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=SPECIAL[1], unk_token="<unk>")


Script = Callable[[GenerationRequest], Sequence[int]]


@dataclass
class ScriptedGenerator:
    """Says what `script` says, `block` ids at a time, through the assembler it is given, by the rules of a generator.

    After `num_free_blocks` blocks it waits for `gate` before each one; `error` is raised instead of block `fail_at`.
    """

    script: Script
    block: int = 3
    fail_at: int | None = None
    error: Exception | None = None
    num_free_blocks: float = math.inf
    gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    durable: bool = True
    requests: list[GenerationRequest] = field(default_factory=list)
    num_running: int = 0
    opened: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    closed: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)

    async def generate(self, request: GenerationRequest, assembler: TextAssembler) -> AsyncIterator[GenerationChunk]:
        self.requests.append(request)
        self.num_running += 1
        self.opened.put(request.request_id)
        reason = "abort"
        try:
            ids = list(self.script(request))[: request.params.max_tokens]
            ending = request.params.ending_token_ids(frozenset({END}))
            ends = [i for i, token in enumerate(ids) if token in ending and i >= request.params.min_tokens]
            ids = ids[: ends[0] + 1] if ends else ids
            finish = FinishReason.STOP if ends else FinishReason.LENGTH
            for number, begin in enumerate(range(0, len(ids), self.block)):
                if self.fail_at == number and self.error is not None:
                    raise self.error
                if number >= self.num_free_blocks:
                    await self.gate.acquire()
                chunk = self._chunk(request, assembler, ids, begin, finish)
                if chunk.finish_reason:
                    reason = chunk.finish_reason.value
                yield chunk
                if chunk.finish_reason:
                    return
        finally:
            self.num_running -= 1
            self.closed.put(reason)

    def _chunk(
        self,
        request: GenerationRequest,
        assembler: TextAssembler,
        ids: list[int],
        begin: int,
        finish: FinishReason,
    ) -> GenerationChunk:
        delta = assembler.push(ids[begin : begin + self.block])
        kept = tuple(ids[begin : begin + delta.num_tokens_kept])
        num_top = request.params.logprobs
        rows = tuple(
            TokenLogprobs(-0.25 * (begin + i), 1, tuple((token + j, -0.25 * (begin + i + j)) for j in range(num_top)))
            for i, token in enumerate(kept)
            if num_top is not None
        )
        chunk = GenerationChunk(delta.text, kept, rows, durable=self.durable)
        last = begin + self.block >= len(ids)
        if not last and not delta.stopped:
            return chunk
        num_output = begin + len(kept)
        metrics = GenerationMetrics(
            num_prompt_tokens=len(request.prompt_token_ids),
            num_output_tokens=num_output,
            num_cached_tokens=0,
            num_rounds=2,
            num_draft_tokens=5,
            num_accepted_tokens=3,
            num_accepted_tokens_per_position=(2, 1),
            drafters={"suffix": DrafterMetrics(5, 3, 2)},
        )
        if delta.stopped:
            return replace(chunk, finish_reason=FinishReason.STOP, stop_reason=delta.stop_reason, metrics=metrics)
        stop_id = kept[-1] if finish is FinishReason.STOP and kept[-1] in request.params.stop_token_ids else None
        text = delta.text + assembler.flush()
        return replace(chunk, text=text, finish_reason=finish, stop_reason=stop_id, metrics=metrics)


@dataclass
class LiveServer:
    """`create_app` and `serve_http` in a thread with an event loop of its own."""

    generator: ScriptedGenerator
    tokenizer: Any
    settings: HttpSettings = field(default_factory=lambda: HttpSettings(served_model_names=("tiny", "org/tiny")))
    keys: ApiKeys = field(default_factory=ApiKeys)
    context_limit: int = 200
    drain_timeout_s: float = GIVE_UP_S
    metrics: Metrics = field(default_factory=Metrics)
    url: str = ""
    app: Any = None

    def __post_init__(self) -> None:
        size = max(self.tokenizer.get_vocab().values()) + 1
        info = ModelInfo("tiny", "main", "", size, self.context_limit, frozenset({END}))
        self.state = StaticFrontState(info)
        self._ports: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.app = create_app(
            self.generator, self.tokenizer, self.settings, state=self.state, metrics=self.metrics, api_keys=self.keys
        )
        await serve_http(
            self.app, "127.0.0.1", 0, stop=self._stop, drain_timeout_s=self.drain_timeout_s, on_ready=self._ports.put
        )
        # Everything the server started has ended with it.
        self.left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    def stop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)

    def join(self) -> None:
        self._thread.join(timeout=GIVE_UP_S)
        assert not self._thread.is_alive()
        assert self.left == []

    def __enter__(self) -> LiveServer:
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._ports.get(timeout=GIVE_UP_S)}"
        self.client = httpx.Client(timeout=GIVE_UP_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.stop()
        self.join()

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.client.post(self.url + path, json=body, **options)

    def connect(self, path: str, body: Any, num_sent: int | None = None) -> socket.socket:
        """A request of which so many bytes of the body are sent, and of whose answer nothing is read."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(GIVE_UP_S)
        connection.connect((host, int(port)))
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data[:num_sent])
        return connection

    def go_on(self) -> None:
        """The generator waits no more."""

        def release() -> None:
            for _ in range(1000):
                self.generator.gate.release()

        self.loop.call_soon_threadsafe(release)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    @contextlib.contextmanager
    def stream(self, path: str, body: Any) -> Iterator[httpx.Response]:
        with httpx.stream("POST", self.url + path, json={"stream": True} | body, timeout=GIVE_UP_S) as response:
            assert response.status_code == 200
            yield response

    def streamed(self, path: str, body: Any) -> list[Any]:
        with self.stream(path, body) as response:
            return events(response)


def events(response: httpx.Response) -> list[Any]:
    """The payloads of a stream; "[DONE]" as it is."""
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def joined(chunks: list[Any], index: int = 0) -> str:
    """The text of a choice."""
    mine = [choice for chunk in chunks[:-1] for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in mine)


TOKENIZER = byte_level_tokenizer()
TEXT = "the drafters propose, ha ha, and the target decides: 😀 café"
IDS = [*TOKENIZER(TEXT, add_special_tokens=False)["input_ids"], END]


def live_server(text: str = TEXT, server: dict[str, Any] | None = None, **generator: Any) -> LiveServer:
    """One that says `text` and ends. `server`, `generator`: further fields of the two."""
    ids = [*TOKENIZER(text, add_special_tokens=False)["input_ids"], END]
    return LiveServer(ScriptedGenerator(lambda request: ids, **generator), TOKENIZER, **(server or {}))
