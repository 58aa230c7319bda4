"""The models that gpu_check looks at: random weights in transformers' own classes, put into a LoadedModel."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
import transformers

from moot.core.types import ModelInfo
from moot.model.cache.contiguous import KvShape
from moot.model.gpu.gpu_runner import GpuRunner
from moot.model.loading.load import LoadedModel
from moot.model.modules.attention import ATTENTION_NAME
from moot.model.modules.tiled_layers import install

BIG = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
MIDDLE = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Subject:
    """`deadline`: monotonic time at which the running check must have ended; see `tick`."""

    def __init__(
        self, device: torch.device, is_small: bool, epsilon: float, *, use_graphs: bool, use_kernel: bool | None
    ) -> None:
        self.device, self.is_small, self.epsilon = device, is_small, epsilon
        self.use_graphs, self.use_kernel = use_graphs, use_kernel
        self.deadline = float("inf")
        self._big: GpuRunner | None = None

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16 on a GPU. On a CPU float32: this is then about the script."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def tick(self) -> None:
        """Raises TimeoutError past the deadline: called between steps, all of which are short."""
        if time.monotonic() > self.deadline:
            raise TimeoutError("the check ran out of its time")

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def text_runner(self, batch_invariant: bool) -> GpuRunner:
        """A model small enough to write many texts. Its last layer is sharp, so that ties are not everywhere."""
        fields = SMALL if self.is_small else MIDDLE
        loaded = make_loaded(fields, self.dtype, self.device, sharpness=8.0)
        return GpuRunner(loaded, 64 * 512, batch_invariant, self.use_kernel, self.use_graphs)

    def big_runner(self) -> GpuRunner:
        """The 8B-shaped model, kept from one check to the next."""
        if self._big is None:
            loaded = make_loaded(SMALL if self.is_small else BIG, self.dtype, self.device)
            self._big = GpuRunner(loaded, 64 * 1536, False, self.use_kernel, self.use_graphs)
        return self._big

    def let_go(self) -> None:
        """Give back the memory of models that nobody holds."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@torch.no_grad()
def make_loaded(
    fields: dict[str, int], dtype: torch.dtype, device: torch.device, sharpness: float = 1.0
) -> LoadedModel:
    """A Llama with random weights, made where it will run. It has no tokenizer: nothing here writes words."""
    config = transformers.AutoConfig.for_model(
        "llama", max_position_embeddings=8192, tie_word_embeddings=False, attn_implementation="eager", **fields
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    try:
        with torch.device(device):
            model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    finally:
        torch.set_default_dtype(before)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5)
    model.get_output_embeddings().weight.mul_(sharpness)
    install(model)
    model.set_attn_implementation(ATTENTION_NAME)
    head_dim = fields["hidden_size"] // fields["num_attention_heads"]
    shape = KvShape(fields["num_hidden_layers"], fields["num_key_value_heads"], head_dim, dtype, device)
    vocab_size = fields["vocab_size"]
    info = ModelInfo("random-llama", "0", "", vocab_size, 8192)
    return LoadedModel(model, None, info, shape, fields["num_attention_heads"], vocab_size, vocab_size, True)
