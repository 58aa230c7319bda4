"""A small recurrent network on the target's last hidden state that guesses what follows the token after it.

Recurrent drafting (arXiv 2403.09919), without attention: with s the target's last hidden state after token x[i] and
e(x) the target's embedding of x, both scaled to a mean square of 1 on the way in, each step takes one more known (or
guessed) token and says what follows it:

    s <- s + W2 (silu(g) * u)    [g; u] = W1 [rms(s); rms(e(x[i+1])); rms(e(x[i])); ...]
    logits = R s + b             R: rows of the target's own output layer for its most frequent ids

One more row, which is learned, stands for all ids that are not among those: its probability says how far the others
can be trusted. No cache: the state is all that a step needs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from moot.core.errors import ConfigError

KIND = "heads"
_FORMAT = 2
"""Since 2 the ids that it can guess are ordered by how often the target wrote them."""
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class RecurrentHeadShape:
    """`state`: numbers in the target's hidden state; `width`: of the gated layer; `vocab`: ids that it can guess;
    `tokens`: how many of the last tokens a step sees."""

    state: int
    width: int = 1024
    vocab: int = 12_288
    tokens: int = 2


class RecurrentHead(nn.Module):
    def __init__(self, shape: RecurrentHeadShape, token_ids: Tensor) -> None:
        """`token_ids`: int64 [vocab], what each output but the last stands for; in files the most frequent first."""
        super().__init__()
        self.shape = shape
        self.register_buffer("token_ids", token_ids)
        self.inward = nn.Linear(shape.state * (1 + shape.tokens), 2 * shape.width, bias=False)
        self.outward = nn.Linear(shape.width, shape.state, bias=False)
        self.other = nn.Parameter(torch.zeros(shape.state))
        self.bias = nn.Parameter(torch.zeros(shape.vocab + 1))

    def advance(self, states: Tensor, embedded: Tensor) -> Tensor:
        """One step. states [n, state]; embedded [n, tokens * state]: `embed` of the last tokens, the latest first."""
        inputs = torch.cat((rms(states).to(embedded.dtype), embedded), -1)
        gate, up = functional.linear(inputs, self.inward.weight.to(embedded.dtype)).chunk(2, -1)
        change = functional.linear(functional.silu(gate) * up, self.outward.weight.to(embedded.dtype))
        return states + change.to(states.dtype)

    def logits(self, states: Tensor, rows: Tensor) -> Tensor:
        """Logits float32 [n, vocab + 1], the last column for all other ids. rows [vocab, state]: the target's, of
        `token_ids`."""
        known = functional.linear(states.to(rows.dtype), rows).float()
        other = states.float() @ self.other.float()
        return torch.cat((known, other[:, None]), 1) + self.bias.float()

    def chosen(self, columns: Tensor) -> RecurrentHead:
        """A separate head that guesses the ids of `columns` alone, int64 [n], in their order."""
        shape = replace(self.shape, vocab=len(columns))
        head = RecurrentHead(shape, self.get_buffer("token_ids")[columns].clone())
        weights = {name: value.detach() for name, value in self.named_parameters()}
        weights["bias"] = torch.cat((weights["bias"][columns], weights["bias"][-1:]))
        head.load_state_dict(weights | {"token_ids": head.get_buffer("token_ids")}, assign=True)
        return head

    def save(self, folder: Path, facts: dict[str, Any]) -> None:
        """Weights in bfloat16. `facts`: further keys of the config."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in self.named_parameters()}
        weights["token_ids"] = self.get_buffer("token_ids").to(torch.int32)
        save_file(weights, folder / _WEIGHTS)
        config = {"kind": KIND, "format": _FORMAT, **asdict(self.shape), **facts}
        (folder / _CONFIG).write_text(json.dumps(config, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> tuple[RecurrentHead, dict[str, Any]]:
        """The head in bfloat16, and its config. Raises ConfigError."""
        try:
            config = json.loads((folder / _CONFIG).read_text())
            if (config.get("kind"), config.get("format")) != (KIND, _FORMAT):
                raise ConfigError(f"{folder} holds no recurrent head of format {_FORMAT}")
            shape = RecurrentHeadShape(*(int(config[name]) for name in RecurrentHeadShape.__slots__))
            weights = load_file(folder / _WEIGHTS)
            head = cls(shape, weights.pop("token_ids").long()).to(torch.bfloat16)
            head.load_state_dict(weights | {"token_ids": head.get_buffer("token_ids")})
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise ConfigError(f"cannot open recurrent head {folder}: {error}") from error
        return head, config


def rms(x: Tensor) -> Tensor:
    """The input scaled to a mean square of 1, float32."""
    return functional.rms_norm(x.float(), x.shape[-1:], None, _EPSILON)


def embed(embedding: Tensor, token_ids: Tensor) -> Tensor:
    """Embeddings of the last tokens, as input of a step. token_ids [n, tokens], the latest first; embedding [ids,
    state]. Returns [n, tokens * state], its dtype."""
    return rms(functional.embedding(token_ids, embedding)).to(embedding.dtype).flatten(1)
