"""The peers of the suite's routers, all real and in this process: verifiers over tiny models, drafter pods, files."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from path_drawing import FIXED_TEXTS, LOCAL, PRINTABLE, STAGES, TARGETS, TargetSpec
from path_wild import Knowing, Known, Wild

from moot.core.types import Draft, FinishReason, ModelInfo, SamplingParams, TokenLogprobs
from moot.metrics import Metrics
from moot.model.load import LoadedModel, load_model
from moot.model.recurrent_head import HeadShape, RecurrentHead
from moot.model.runner import ModelRunner
from moot.model.tiny import make_tiny_model
from moot.proposers.base import Proposer
from moot.proposers.datastore import build
from moot.proposers.ngram_table import NgramTable
from moot.rpc.server import GrpcServer
from moot.testing import Manner, ScriptedDrafter, ScriptedText
from moot.v1 import drafter_service_pb2_grpc, verifier_service_pb2_grpc
from moot.worker import WorkerThread
from services.drafter.config import DrafterConfig
from services.drafter.engine import DrafterEngine
from services.drafter.serve import make_proposer
from services.drafter.servicer import DrafterServicer
from services.drafter.wire import description_to_pb
from services.verifier.commands import Answer, Failed, Open, Verify
from services.verifier.config import VerifierConfig
from services.verifier.engine import Engine
from services.verifier.servicer import VerifierServicer

CACHE_TOKENS = 64 * 512
ROWS = 300
"""Of the embeddings: more than the tokenizer has ids."""
_MANNERS = (Manner.WRONG, Manner.DOUBLE, Manner.STALE, Manner.UNKNOWN, Manner.BAD_CONFIDENCES, Manner.ABSTAIN)


@dataclass(frozen=True)
class Plain:
    """What plain decoding gives a request, if no stop string ends it."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...]


Asked = tuple[Sequence[int], SamplingParams]


class PlainTarget:
    """Plain decoding: an engine of its own, without drafters or shared prompts, that is sent empty drafts only."""

    def __init__(self, loaded: LoadedModel, spec: TargetSpec) -> None:
        config = VerifierConfig(model=spec.name, max_model_len=spec.max_model_len, prefix_cache_tokens=0)
        self._engine = Engine(ModelRunner(loaded, CACHE_TOKENS, True), config)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="plain")

    def close(self) -> None:
        self._thread.shutdown()

    async def decode(self, asked: Sequence[Asked]) -> list[Plain]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._decode, asked)

    def _decode(self, asked: Sequence[Asked]) -> list[Plain]:
        inbox: list[Answer] = []
        stream = self._engine.connect(inbox.extend)
        opened = [Open(index, f"plain-{index}", tuple(prompt), params) for index, (prompt, params) in enumerate(asked)]
        self._engine.submit(stream, opened)
        answers: list[list[Any]] = [[] for _ in asked]
        lengths = [len(prompt) for prompt, _ in asked]
        while any(not own or own[-1].finish_reason is None for own in answers):
            self._engine.step()
            arrived, inbox[:] = list(inbox), []
            for answer in arrived:
                if isinstance(answer, Failed):
                    raise RuntimeError(f"plain decoding failed: {answer.message}")
                index, verification = answer.session_id, answer.verification
                answers[index].append(verification)
                lengths[index] += len(verification.output_token_ids)
                if verification.finish_reason is None:
                    command = Verify(index, len(answers[index]), lengths[index], Draft())
                    self._engine.submit(stream, [command])
        self._engine.disconnect(stream)
        self._engine.step()
        return [
            Plain(
                tuple(id_ for one in own for id_ in one.output_token_ids),
                own[-1].finish_reason,
                tuple(entry for one in own for entry in one.logprobs),
            )
            for own in answers
        ]


class ServedTarget:
    """A verifier with the drafters inside that `spec` names, small chunks and shared prompts, on loopback."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._server = GrpcServer(engine.config.link, ())
        verifier_service_pb2_grpc.add_VerifierServiceServicer_to_server(
            VerifierServicer(engine, engine.config), self._server.server
        )

    async def start(self) -> None:
        self.engine.start()
        await self._server.start("127.0.0.1", 0)

    async def stop(self) -> None:
        await self._server.stop(0)
        await asyncio.to_thread(self.engine.stop)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.port}"

    def left(self) -> dict[str, int]:
        """What is held of requests, by where."""
        engine, serving = self.engine, self.engine.serving
        return {
            "verifier sessions": engine.stats.num_sessions,
            "verifier commands": engine.stats.num_queued,
            "verifier cache tokens": engine.runner.pool.used_tokens,
            "scheduler": serving.scheduler.num_admitted + serving.scheduler.num_waiting,
            "gathering": len(serving.gathering),
            "drafters inside": sum(getattr(one, "num_sessions", 0) for one in serving.inside.drafters),
        }


class Pod:
    """A drafter as a service on loopback."""

    def __init__(self, config: DrafterConfig, make: Callable[[DrafterConfig], tuple[Proposer[Any], ModelInfo]]) -> None:
        self._worker = WorkerThread(config.drafter_id)
        self._proposer, info = self._worker.submit(lambda: make(config)).result(timeout=60)
        self.engine = DrafterEngine(self._proposer, config, Metrics("drafter"), info.vocab_size)
        self._server = GrpcServer(config.link, ())
        description = description_to_pb(self._proposer.kind, self._proposer.family, info)
        servicer = DrafterServicer(
            self.engine, description, config.drafter_id, config.max_queued_answers, config.max_message_bytes
        )
        drafter_service_pb2_grpc.add_DrafterServiceServicer_to_server(servicer, self._server.server)

    async def start(self) -> None:
        self.engine.start(self._worker)
        await self._server.start("127.0.0.1", 0)

    async def stop(self) -> None:
        await self._server.stop(0)
        await asyncio.to_thread(self.engine.stop)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.port}"

    def left(self) -> dict[str, int]:
        return {"sessions": self.engine.num_sessions, "cache tokens": getattr(self._proposer, "kv_used_tokens", 0)}


class ProtocolPod:
    """A drafter that answers twice, to other rounds, or not at all, forgets sessions and miscounts confidences."""

    def __init__(self, info: ModelInfo) -> None:
        draw = random.Random("protocol")
        self._drafter = ScriptedDrafter(
            ScriptedText(vocab_size=info.vocab_size, end_token_id=min(info.end_token_ids)),
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            manner=lambda: draw.choice(_MANNERS),
            family="protocol",
        )

    async def start(self) -> None:
        await self._drafter.start()

    async def stop(self) -> None:
        await self._drafter.kill()

    @property
    def address(self) -> str:
        return self._drafter.address

    def left(self) -> dict[str, int]:
        return {"sessions": self._drafter.num_sessions}


@dataclass
class House:
    """What systems share, made when it is asked for. `change`: done to each verifier that is made."""

    folder: Path
    """What lies there already is not made again."""
    change: Callable[[Engine], None] = lambda engine: None
    patience_s: float = 10.0
    """How long what requests hold may outlive them."""
    known: Known = field(default_factory=dict)
    _loaded: dict[str, LoadedModel] = field(default_factory=dict)
    _plain: dict[str, PlainTarget] = field(default_factory=dict)
    _served: dict[str, ServedTarget] = field(default_factory=dict)
    _pods: dict[str, Pod | ProtocolPod] = field(default_factory=dict)

    def model(self, spec: TargetSpec) -> Path:
        path = self.folder / spec.name
        if not path.exists():
            dtype = getattr(torch, spec.dtype)
            make_tiny_model(path, spec.family, ROWS, dtype=dtype, layers=3, context=spec.context)
        return path

    def loaded(self, spec: TargetSpec) -> LoadedModel:
        if spec.name not in self._loaded:
            torch.set_num_threads(1)
            self._loaded[spec.name] = load_model(self.model(spec), "cpu", spec.dtype)
        return self._loaded[spec.name]

    def plain(self, spec: TargetSpec) -> PlainTarget:
        if spec.name not in self._plain:
            self._plain[spec.name] = PlainTarget(self.loaded(spec), spec)
        return self._plain[spec.name]

    async def served(self, spec: TargetSpec) -> ServedTarget:
        if spec.name not in self._served:
            config = VerifierConfig(
                model=spec.name,
                drafters=tuple(self._inside(spec)),
                max_model_len=spec.max_model_len,
                prefill_chunk_tokens=48,
                prefix_block_tokens=16,
                max_num_seqs=8,
            )
            # A model of its own: nothing that it computes with is shared with plain decoding.
            engine = Engine(ModelRunner(load_model(self.model(spec), "cpu", spec.dtype), CACHE_TOKENS, True), config)
            self.change(engine)
            self._served[spec.name] = ServedTarget(engine)
            await self._served[spec.name].start()
        return self._served[spec.name]

    def _inside(self, spec: TargetSpec) -> Iterable[str]:
        for name in spec.inside:
            if name == "heads":
                yield f"heads:path={make_head(self.folder / f'head-{spec.name}', self.loaded(spec))}:max_tokens=5"
            elif name == "self":
                yield "self:skip=1:max_tokens=6"
            else:
                yield "lookahead:window=3:ngram=3"

    async def pod(self, name: str) -> Pod | ProtocolPod:
        if name not in self._pods:
            pod = self._pods[name] = self._make_pod(name)
            await pod.start()
        return self._pods[name]

    def _make_pod(self, name: str) -> Pod | ProtocolPod:
        first = TARGETS[0]
        if name == "protocol":
            return ProtocolPod(self.loaded(first).info)
        if name in STAGES:
            # Of the first target's family the drafts are mostly right, of the others hardly ever.
            other = self.model(TARGETS[2])
            stages = ("", "suffix", f"prompt_lookup+neural~model={other}~num_threads=1~dtype=float32")[STAGES[name] - 1]
            ahead = "on" if name == "neural_two" else "off"
            options = ("dtype=float32", f"stages={stages}")
            config = DrafterConfig(
                kind="neural", drafter_id=name, model=str(self.model(first)), option=options, num_threads=1,
                draft_ahead=ahead,
            )  # fmt: skip
            return Pod(config, make_proposer)
        proposer = Knowing(self.known) if name == "knowing" else Wild(name)
        proposer.family = name
        info = self.loaded(first).info
        # All ids that the wire can carry may leave this pod.
        return Pod(DrafterConfig(kind=name, drafter_id=name), lambda config: (proposer, info))

    def left(self, names: Iterable[str], spec: TargetSpec) -> dict[str, int]:
        found = self._served[spec.name].left()
        for name in names:
            if name in self._pods:
                found |= {f"{name} {what}": count for what, count in self._pods[name].left().items()}
        return {what: count for what, count in found.items() if count}

    async def local(self, name: str) -> str:
        """As RouterConfig's `in_process_drafters` takes it."""
        match name:
            case "suffix_store":
                return f"suffix_store=suffix:datastore={await self._store()}:family=suffix_store"
            case "ngram_table":
                return f"ngram_table=ngram:table={await self._table()}:family=ngram_table"
            case "recycling_shared":
                return "recycling_shared=recycling:shared_rows=64"
        assert name in LOCAL
        return name

    async def _store(self) -> Path:
        path = self.folder / "store"
        if not path.exists():
            build(await self._texts(), path)
        return path

    async def _table(self) -> Path:
        path = self.folder / "table.npz"
        if not path.exists():
            NgramTable.build(await self._texts()).save(path)
        return path

    async def _texts(self) -> list[list[int]]:
        """What the targets say to prompts that many cases have."""
        asked = [(list(text.encode()), SamplingParams(temperature=0.0, max_tokens=24, **fields))
                 for text in FIXED_TEXTS for fields in ({}, {"allowed_token_ids": frozenset(PRINTABLE)})]  # fmt: skip
        texts: list[list[int]] = []
        for spec in TARGETS:
            answers = await self.plain(spec).decode(asked)
            texts += [[*prompt, *answer.token_ids] for (prompt, _), answer in zip(asked, answers, strict=True)]
        return texts

    async def close(self) -> None:
        for peer in (*self._pods.values(), *self._served.values()):
            await peer.stop()
        for plain in self._plain.values():
            plain.close()


def make_head(folder: Path, loaded: LoadedModel) -> Path:
    """A head that nearly repeats what the target has just said: right where a text repeats itself."""
    generator = torch.Generator().manual_seed(0)
    width = int(loaded.model.get_input_embeddings().weight.shape[1])  # type: ignore[operator, union-attr]
    head = RecurrentHead(HeadShape(width, 32, len(PRINTABLE), 2), torch.tensor(PRINTABLE))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    head.save(folder, {"tokenizer_fingerprint": loaded.info.tokenizer_fingerprint})
    return folder
