"""Chooses the runner that fits device and model."""

from __future__ import annotations

import logging

from moot.core.errors import ModelRefused
from moot.model.checks.selfcheck import check_passes, find_rules
from moot.model.gpu.gpu_runner import GpuRunner
from moot.model.loading.load import LoadedModel
from moot.model.runner import ModelRunner

_log = logging.getLogger("moot.model")


def choose_runner(loaded: LoadedModel, kv_capacity_tokens: int, batch_invariant: bool) -> ModelRunner:
    """The runner for this model: on a GPU the paged one, for the families that it has; else the one that drives
    transformers' own modules.

    Raises ConfigError where batch-invariant mode is asked for and does not hold.
    """
    runner: ModelRunner | None = None
    if loaded.kv_shape.device.type == "cuda":
        try:
            runner = GpuRunner(loaded, kv_capacity_tokens, batch_invariant)
        except ModelRefused as error:
            _log.warning("driven by its own modules: %s", error)
    runner = runner or plain_runner(loaded, kv_capacity_tokens, batch_invariant)
    facts = {"model": loaded.info.model, "device": str(runner.device), "dtype": str(runner.dtype)}
    _log.info("model is ready to compute", extra={**facts, "computed_by": runner.way})
    return runner


def plain_runner(loaded: LoadedModel, kv_capacity_tokens: int, batch_invariant: bool) -> ModelRunner:
    """The runner that drives the model's own modules or its lean decoder, on whatever device.

    Raises ConfigError where batch-invariant mode is asked for and a check shows that it does not hold here.
    """
    if not batch_invariant:
        return ModelRunner(loaded, kv_capacity_tokens)
    runner = ModelRunner(loaded, kv_capacity_tokens, find_rules(loaded))
    check_passes(runner)
    return runner


def samples_at_once(runner: ModelRunner) -> bool:
    """Whether fetching a row at a time would cost more than drawing rows that no walk comes by."""
    return isinstance(runner, GpuRunner) or runner.device.type != "cpu"
