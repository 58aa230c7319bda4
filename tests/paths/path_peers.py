"""The peers of the suite's routers, all real and in this process: verifiers over tiny models, drafter pods, files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from moot.core.options import make_config
from moot.core.types import SamplingParams
from moot.drafters.attached.recurrent_head import RecurrentHead, RecurrentHeadShape
from moot.drafters.lookup.datastore import build
from moot.drafters.lookup.ngram import NgramTable
from moot.model.backend import plain_runner
from moot.model.loading.load import LoadedModel, load_model
from moot.testing.tiny_model import make_tiny_model
from services.drafter.config import DrafterConfig
from services.drafter.serve import make_drafter_kind
from services.verifier.config import VerifierConfig
from services.verifier.engine import Engine
from tests.paths.path_drawing import FIXED_TEXTS, LOCAL, PRINTABLE, STAGES, TARGETS, TargetSpec
from tests.paths.path_plain import CACHE_TOKENS, PlainTarget
from tests.paths.path_served import Pod, ProtocolPod, ServedTarget
from tests.paths.path_wild import Knowing, Known, Wild

ROWS = 300
"""Of the embeddings: more than the tokenizer has ids."""


@dataclass
class House:
    """What systems share, made when it is asked for. An async context manager."""

    folder: Path
    """What lies there already is not made again."""
    patience_s: float = 60.0
    """How long what requests hold may outlive them."""
    known: Known = field(default_factory=dict)
    _change: Callable[[Engine], None] = lambda engine: None
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
            config = make_config(
                VerifierConfig,
                model=spec.name,
                drafters=tuple(self._attached(spec)),
                max_model_len=spec.max_model_len,
                prefill_chunk_tokens=48,
                prefix_block_tokens=16,
                max_num_seqs=8,
            )
            # A model of its own: nothing that it computes with is shared with plain decoding.
            engine = Engine(plain_runner(load_model(self.model(spec), "cpu", spec.dtype), CACHE_TOKENS, True), config)
            self._change(engine)
            self._served[spec.name] = ServedTarget(engine)
            await self._served[spec.name].start()
        return self._served[spec.name]

    def _attached(self, spec: TargetSpec) -> Iterable[str]:
        for name in spec.attached:
            if name == "heads":
                yield f"heads:path={make_head(self.folder / f'head-{spec.name}', self.loaded(spec))}:max_tokens=5"
            elif name == "self":
                yield "self:skip=1:max_tokens=6"
            else:
                yield "lookahead:window=3:ngram=3"

    async def pod(self, name: str) -> Pod | ProtocolPod:
        if name not in self._pods:
            pod = self._superposed(await self._table()) if name == "superposed" else self._make_pod(name)
            self._pods[name] = pod
            await pod.start()
        return self._pods[name]

    def _superposed(self, table: Path) -> Pod:
        options = ("dtype=float32", f"table={table}")
        config = make_config(DrafterConfig,
            kind="superposed", drafter_id="superposed", model=str(self.model(TARGETS[0])), option=options, num_threads=1
        )  # fmt: skip
        return Pod(config, make_drafter_kind)

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
            config = make_config(DrafterConfig,
                kind="neural", drafter_id=name, model=str(self.model(first)), option=options, num_threads=1,
                draft_ahead=ahead,
            )  # fmt: skip
            return Pod(config, make_drafter_kind)
        drafter = Knowing(self.known) if name == "knowing" else Wild(name)
        drafter.family = name
        info = self.loaded(first).info
        # All ids that the wire can carry may leave this pod.
        return Pod(make_config(DrafterConfig, kind=name, drafter_id=name), lambda config: (drafter, info))

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

    async def change_targets(self, change: Callable[[Engine], None]) -> None:
        """From now on all verifiers are new ones, each changed in this way when it is made."""
        self._change = change
        for target in self._served.values():
            await target.stop()
        self._served.clear()

    async def __aenter__(self) -> House:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for peer in (*self._pods.values(), *self._served.values()):
            await peer.stop()
        for plain in self._plain.values():
            plain.close()


def make_head(folder: Path, loaded: LoadedModel) -> Path:
    """A head that nearly repeats what the target has just said: right where a text repeats itself."""
    generator = torch.Generator().manual_seed(0)
    width = int(loaded.model.get_input_embeddings().weight.shape[1])  # type: ignore[operator, union-attr]
    head = RecurrentHead(RecurrentHeadShape(width, 32, len(PRINTABLE), 2), torch.tensor(PRINTABLE))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    head.save(folder, {"tokenizer_fingerprint": loaded.info.tokenizer_fingerprint})
    return folder
