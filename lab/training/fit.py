"""Gradient descent that can be interrupted: what step k does depends on k and the seed, never on the clock.

A progress bar with rate and time left, on standard error.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

from moot.core.errors import ConfigError

_log = logging.getLogger("lab.training")


@contextmanager
def progress_bar(what: str, unit: str, total: int, done: int = 0) -> Iterator[Any]:
    """Yields an object with `update(count)` and `set_postfix_str(text)`. Where standard error is no terminal a line
    appears every half minute."""
    seconds = 0.2 if sys.stderr.isatty() else 30.0
    bar = tqdm(
        desc=what, unit=unit, total=total, initial=done, unit_scale=True, mininterval=seconds, maxinterval=seconds,
        file=sys.stderr, dynamic_ncols=True, smoothing=0.05,
    )  # fmt: skip
    try:
        yield bar
    finally:
        bar.close()


BETAS = (0.9, 0.98)
LARGEST_GRADIENT = 1.0
_CHECKPOINT_S = 60.0
_CHECKPOINT = ".checkpoint.pt"


@dataclass(frozen=True, slots=True)
class FitPlan:
    """AdamW; the rate rises over `warmup` steps, at most a tenth of all, and falls as a half cosine to a hundredth."""

    steps: int
    rate: float
    warmup: int = 50
    weight_decay: float = 0.01

    def rate_at(self, step: int) -> float:
        rising = min(1.0, (step + 1) / max(1, min(self.warmup, self.steps // 10)))
        done = step / max(1, self.steps)
        return self.rate * rising * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def fit(
    module: nn.Module,
    loss_of: Callable[[int], Tensor],
    plan: FitPlan,
    folder: Path,
    facts: Mapping[str, Any],
    until: float = float("inf"),
    what: str = "training",
) -> bool:
    """Train `module` on `loss_of(step)` for `plan.steps` steps; go on from the checkpoint in `folder` if there is one.

    Stops with a checkpoint after `until` (of time.monotonic), and returns whether it is complete. `facts`: what decides
    the result; raises ConfigError when a checkpoint was made with others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _CHECKPOINT
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": plan.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=plan.rate, betas=BETAS)
    first = _resume(path, module, optimizer, facts)
    saved_at = time.monotonic()
    recent: float | None = None
    with progress_bar(what, "steps", plan.steps, first) as bar:
        for step in range(first, plan.steps):
            if (now := time.monotonic()) >= until:
                _save(path, step, module, optimizer, facts)
                return False
            if now - saved_at > _CHECKPOINT_S:
                _save(path, step, module, optimizer, facts)
                saved_at = now
            for group in optimizer.param_groups:
                group["lr"] = plan.rate_at(step)
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(step)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, LARGEST_GRADIENT)
            optimizer.step()
            value = float(loss.detach())
            recent = value if recent is None else 0.98 * recent + 0.02 * value
            bar.set_postfix_str(f"loss {recent:.3f}", refresh=False)
            bar.update(1)
    _save(path, plan.steps, module, optimizer, facts)
    return True


def forget(folder: Path) -> None:
    """Remove the checkpoint: its result has been written."""
    (folder / _CHECKPOINT).unlink(missing_ok=True)


def _save(path: Path, step: int, module: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]) -> None:
    state = {"facts": dict(facts), "step": step, "module": module.state_dict(), "optimizer": optimizer.state_dict()}
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    torch.save(state, temporary)
    temporary.replace(path)


def _resume(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]) -> int:
    """The step to go on with."""
    if not path.is_file():
        return 0
    try:
        state = torch.load(path, weights_only=True) if zipfile.is_zipfile(path) else None
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise ConfigError(f"checkpoint {path} cannot be read, remove it to begin anew: {error}") from error
    if state is None:
        raise ConfigError(f"checkpoint {path} cannot be read, remove it to begin anew: it is no archive")
    if state["facts"] != dict(facts):
        raise ConfigError(f"checkpoint {path} is of a training with other settings; remove it to begin anew")
    module.load_state_dict(state["module"])
    optimizer.load_state_dict(state["optimizer"])
    _log.info("going on from step %d", state["step"])
    return int(state["step"])
