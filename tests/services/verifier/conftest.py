"""Tiny models on disk, and engines over them that are stepped by the test or run by their own thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moot.core.options import make_config
from moot.model.backend import plain_runner
from moot.model.loading.load import LoadedModel, load_model
from moot.testing.tiny_model import make_tiny_model
from services.verifier.config import VerifierConfig
from services.verifier.engine import Engine
from tests.services.verifier.verifier_driver import MakeEngine


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder with a tiny model; the same arguments give the same folder."""
    made: dict[tuple[Any, ...], Path] = {}

    def make(family: str = "llama", dtype: str = "float64", **config: Any) -> Path:
        key = (family, dtype, *sorted(config.items()))
        if key not in made:
            path = tmp_path_factory.mktemp("model")
            made[key] = make_tiny_model(path, family, dtype=getattr(torch, dtype), **config)
        return made[key]

    return make


@pytest.fixture(scope="session")
def loaded_model(model_folder: Callable[..., Path]) -> Callable[..., LoadedModel]:
    made: dict[tuple[Any, ...], LoadedModel] = {}

    def load(family: str = "llama", dtype: str = "float64", **config: Any) -> LoadedModel:
        torch.set_num_threads(1)
        key = (family, dtype, *sorted(config.items()))
        if key not in made:
            made[key] = load_model(model_folder(family, dtype, **config), "cpu", dtype)
        return made[key]

    return load


@pytest.fixture
def make_engine(loaded_model: Callable[..., LoadedModel]) -> Iterator[MakeEngine]:
    """Engines of their own cache and limits; at the end each must hold nothing."""
    engines: list[Engine] = []

    def make(
        family: str = "llama",
        dtype: str = "float64",
        *,
        batch_invariant: bool = False,
        pages: int = 64,
        start: bool = False,
        model: dict[str, Any] | None = None,
        **options: Any,
    ) -> Engine:
        runner = plain_runner(loaded_model(family, dtype, **(model or {})), pages * 512, batch_invariant)
        engine = Engine(runner, make_config(VerifierConfig, model="tiny", **options))
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
