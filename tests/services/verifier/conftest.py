"""Tiny models on disk, and engines over them that are stepped by the test or run by their own thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from moot.drafters.attached.recurrent_head import RecurrentHead, RecurrentHeadShape
from moot.model.loading.load import LoadedModel, load_model
from moot.testing.tiny_model import make_tiny_model
from services.verifier.engine import Engine
from tests.services.verifier.verifier_driver import NUM_TOKENS, MakeEngine, engine_on


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder with a tiny model; the same arguments give the same folder."""

    @cache
    def make(family: str = "llama", dtype: str = "float64", **config: Any) -> Path:
        return make_tiny_model(tmp_path_factory.mktemp("model"), family, dtype=getattr(torch, dtype), **config)

    return make


@pytest.fixture(scope="session")
def loaded_model(model_folder: Callable[..., Path]) -> Callable[..., LoadedModel]:
    @cache
    def load(family: str = "llama", dtype: str = "float64", **config: Any) -> LoadedModel:
        torch.set_num_threads(1)
        return load_model(model_folder(family, dtype, **config), "cpu", dtype)

    return load


@pytest.fixture
def make_engine(loaded_model: Callable[..., LoadedModel]) -> Iterator[MakeEngine]:
    """Engines of their own cache and limits; at the end each must hold nothing."""
    engines: list[Engine] = []

    def make(
        family: str = "llama",
        dtype: str = "float64",
        *,
        start: bool = False,
        model: dict[str, Any] | None = None,
        **options: Any,
    ) -> Engine:
        engine = engine_on(loaded_model(family, dtype, **(model or {})), **options)
        engines.append(engine)
        if start:
            engine.start()
        return engine

    yield make
    for engine in engines:
        engine.stop()
        if not engine.is_running:
            with torch.inference_mode():
                while engine.step():
                    pass
        assert engine.stats.num_sessions == 0
        assert engine.runner.pool.used_tokens == 0
        assert engine.serving.scheduler.num_admitted == engine.serving.scheduler.num_waiting == 0


@pytest.fixture(scope="session")
def head_flag(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A head with random weights over a few ids: it is right now and then where only these are allowed."""
    folder = tmp_path_factory.mktemp("inside-head")
    head = RecurrentHead(RecurrentHeadShape(64, 16, 100, 2), torch.arange(40, 140))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    head.save(folder, {})
    return f"heads:path={folder}:max_tokens={NUM_TOKENS}"
