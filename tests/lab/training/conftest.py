"""Training text of a tiny model, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lab.training.dataset import TextStore
from lab.training.text_making import TextMaker, make_text
from moot.model.loading.load import LoadedModel, load_model
from moot.testing.tiny_model import make_tiny_model
from tests.lab.training.small_text import SETTINGS


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), hidden=64, sharpness=2.0)


@pytest.fixture(scope="session")
def target(target_folder: Path) -> LoadedModel:
    return load_model(target_folder, device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def text(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> TextStore:
    """5 shards, one of them long."""
    maker = TextMaker(target, SETTINGS)
    store = TextStore.create(tmp_path_factory.mktemp("text"), maker.manifest)
    assert make_text(maker, store, 4 * 20 * 96 + 5 * 160)
    return store
