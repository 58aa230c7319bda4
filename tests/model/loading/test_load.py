"""What is loaded, what is refused by name, and what is known about a model afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from moot.core.errors import ConfigError, ModelRefused
from moot.model.backend import plain_runner
from moot.model.inputs import SequenceInput
from moot.model.loading.load import choose_dtype, load_model
from moot.testing.tiny_model import byte_tokenizer, make_tiny_model

FIELDS: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 256,
}


def other_model(path: Path, kind: str, **config: Any) -> Path:
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(FIELDS | config)))
    made.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        ("mamba", {"state_size": 8}, "MambaForCausalLM has 2 layers, of which 0"),
        ("bloom", {"n_head": 4, "n_layer": 2}, "BloomForCausalLM has 2 layers, of which 0"),
        (
            "gpt_oss",
            {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4},
            "GptOssForCausalLM .* s_aux",
        ),
        ("rwkv", {"attention_hidden_size": 64}, "RwkvForCausalLM"),
        (
            "bamba",
            {"intermediate_size": 64, "num_key_value_heads": 2, "attn_layer_indices": [1], "mamba_n_heads": 4}
            | {"mamba_d_head": 32, "mamba_d_state": 8, "mamba_n_groups": 1},
            "BambaForCausalLM has 2 layers, of which 1 use",
        ),
        (
            "lfm2",
            {"intermediate_size": 64, "num_key_value_heads": 2, "full_attn_idxs": [1]},
            "Lfm2ForCausalLM has 2 layers, of which 1 use",
        ),
    ],
)
def test_what_cannot_be_driven_is_refused_by_name(
    tmp_path: Path, kind: str, config: dict[str, Any], reason: str
) -> None:
    """State-space models, attention of a model's own and features we do not compute never reach a request.

    The message says which model it is about: a process may load more than one.
    """
    folder = other_model(tmp_path, kind, **config)
    with pytest.raises(ModelRefused, match=reason) as refusal:
        load_model(folder, dtype="float32")
    assert str(refusal.value).startswith(f"{folder}: ")


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
        ("phi3", {"intermediate_size": 128, "num_key_value_heads": 2}),
        ("gemma3_text", {"intermediate_size": 128, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8}),
    ],
)
def test_other_families_work_as_they_are(tmp_path: Path, kind: str, config: dict[str, Any]) -> None:
    """Any decoder whose attention is a registered function is driven, batch-invariant mode included."""
    assert plain_runner(load_model(other_model(tmp_path, kind, **config), dtype="float32"), 512, True).batch_invariant


def test_a_context_ends_where_rotation_would_depend_on_batch_mates(tmp_path: Path) -> None:
    """Longrope chooses frequencies by the longest sequence of a pass: only the context with one choice is served."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = {"intermediate_size": 128, "num_key_value_heads": 2, "rope_parameters": rope}
    path = other_model(tmp_path, "phi3", original_max_position_embeddings=64, **config)
    runner = plain_runner(load_model(path, "cpu", "float64"), 3 * 512, False)
    longest = runner.info.context_limit
    alone = runner.forward([SequenceInput(runner.new_cache(), [1, 2, 3], None, [2])])
    beside = SequenceInput(runner.new_cache(), list(range(longest)), None, [])
    batched = runner.forward([SequenceInput(runner.new_cache(), [1, 2, 3], None, [2]), beside])
    assert longest == 64
    torch.testing.assert_close(batched[0], alone[0])


def test_experts_are_served_in_natural_mode_only(tmp_path: Path) -> None:
    """Products that are no linear layers are not tiled, so the batch-invariant mode names one and is refused."""
    config = {"intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 4}
    loaded = load_model(other_model(tmp_path, "mixtral", **config), dtype="float32")
    with pytest.raises(ConfigError, match="linear layers only; .* also has .*mlp"):
        plain_runner(loaded, 512, True)
    assert not plain_runner(loaded, 512, False).batch_invariant


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = T5Config(vocab_size=300, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="T5 is an encoder-decoder model"):
        load_model(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    """Only safetensors: a pickle may run code."""
    make_tiny_model(tmp_path)
    weights = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match="safetensors"):
        load_model(tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=tmp_path.name):
        load_model(tmp_path)


def test_what_is_known_of_a_model(tmp_path: Path) -> None:
    """The tokenizer's size, not the padded one; end ids of model and tokenizer; the config's context limit."""
    path = make_tiny_model(tmp_path / "tiny", "mistral", vocab_size=320, context=777)
    loaded = load_model(path, dtype="float32")
    assert loaded.info.model == "tiny"
    assert (loaded.info.vocab_size, loaded.num_embeddings, loaded.num_logits) == (259, 320, 320)
    assert loaded.info.context_limit == 777
    assert loaded.info.end_token_ids == {258}
    assert loaded.kv_shape.num_kv_heads == 2


def test_revision_tells_weights_apart(tmp_path: Path) -> None:
    """A folder's revision follows its config and weights, and not its name."""
    one, same, other = (
        load_model(make_tiny_model(tmp_path / name, seed=seed), dtype="float32").info.revision
        for name, seed in (("one", 0), ("same", 0), ("other", 1))
    )
    assert one == same != other


_FAST: dict[str, object] = {"architecture": "x86_64", "avx512_f": True, "avx512_bf16": True}
_AMX: dict[str, object] = {"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": True}
_PLAIN: dict[str, object] = {"architecture": "x86_64", "avx2": True, "avx512_f": True, "avx512_bf16": False}
_ARM: dict[str, object] = {"architecture": "aarch64", "bf16": True, "neon": True}


@pytest.mark.parametrize(
    ("features", "stored", "dtype"),
    [
        (_FAST, torch.bfloat16, torch.bfloat16),
        (_FAST, torch.float32, torch.bfloat16),
        (_FAST, torch.float16, torch.bfloat16),
        (_FAST, None, torch.bfloat16),
        (_FAST, torch.float64, torch.float64),
        (_AMX, torch.bfloat16, torch.bfloat16),
        (_PLAIN, torch.bfloat16, torch.float32),
        (_PLAIN, torch.float16, torch.float32),
        (_PLAIN, None, torch.float32),
        (_PLAIN, torch.float64, torch.float64),
        (_ARM, torch.bfloat16, torch.float32),
        ({}, torch.bfloat16, torch.float32),
    ],
)
def test_dtype_auto_follows_from_features_and_model(
    features: dict[str, object], stored: torch.dtype | None, dtype: torch.dtype
) -> None:
    """On a CPU `auto` follows from what the CPU can do and how the model is stored, never from a measurement."""
    assert choose_dtype("auto", torch.device("cpu"), stored, features) is dtype


def test_dtype_named_is_dtype_taken() -> None:
    """A dtype that is named wins over what `auto` would be."""
    assert choose_dtype("float32", torch.device("cpu"), torch.bfloat16, _FAST) is torch.float32
    assert choose_dtype("bfloat16", torch.device("cpu"), torch.float64, _PLAIN) is torch.bfloat16


def test_dtype_auto_of_a_loaded_model_is_that_of_this_cpu(tmp_path: Path) -> None:
    """Loading asks for the features of this CPU and for the dtype that the model's own config states."""
    folder = make_tiny_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    capabilities = torch.cpu.get_capabilities()
    stored = getattr(torch, config["dtype"])
    assert load_model(folder).kv_shape.dtype is choose_dtype("auto", torch.device("cpu"), stored, capabilities)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float64"}))
    assert load_model(folder).kv_shape.dtype is torch.float64


@pytest.mark.parametrize("arguments", [{"dtype": "int8"}, {"device": "quantum"}])
def test_unknown_dtype_or_device_is_a_config_error(tmp_path: Path, arguments: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments.values()))):
        load_model(make_tiny_model(tmp_path), **arguments)
