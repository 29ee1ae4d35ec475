"""Tiny random decoders of several families, their graphs, and the means to compare them with torch."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.export.convert import PlainGraph, convert

VOCAB = 1000
CAPACITY = 96

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
#: Wide enough heads for half of a head's channels to be a rotary width of 16.
_PARTIAL = {**_COMMON, "hidden_size": 128, "intermediate_size": 256}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FALCON = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
_WINDOW = {"sliding_window": 16, "use_sliding_window": True}
_MIXED = ["full_attention", "sliding_attention"]

#: name -> (model type, configuration)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**_GROUPED, "tie_word_embeddings": True}),
    "llama-wide-heads": ("llama", {**_GROUPED, "head_dim": 32, "rope_scaling": _YARN}),
    "llama3": ("llama", {**_GROUPED, "rope_scaling": _LLAMA3}),
    "llama-dynamic": ("llama", {**_GROUPED, "max_position_embeddings": 90, "rope_scaling": _DYNAMIC}),
    "llama-head-20": ("llama", {**_GROUPED, "head_dim": 20}),
    "mistral": ("mistral", {**_GROUPED, "sliding_window": None}),
    "mistral-window": ("mistral", {**_GROUPED, "sliding_window": 16}),
    "mistral-far-window": ("mistral", {**_GROUPED, "sliding_window": 64}),
    "qwen2": ("qwen2", _GROUPED),
    "qwen2-mixed": ("qwen2", {**_GROUPED, **_WINDOW, "layer_types": _MIXED}),
    "qwen3": ("qwen3", {**_GROUPED, "head_dim": 16}),
    "gemma": ("gemma", {**_GROUPED, "head_dim": 16}),
    "gemma2": ("gemma2", {**_GROUPED, "head_dim": 16, "sliding_window": 16}),
    "gemma2-no-cap": (
        "gemma2",
        {**_GROUPED, "head_dim": 16, "sliding_window": 16, "attn_logit_softcapping": None},
    ),
    "gemma2-eager": ("gemma2", {**_GROUPED, "head_dim": 16, "sliding_window": 16, "attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", {**_GROUPED, "head_dim": 16, "sliding_window": 16, "layer_types": _MIXED}),
    "phi": ("phi", _COMMON),
    "phi-half": ("phi", {**_PARTIAL, "partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {**_GROUPED, "sliding_window": None}),
    "phi3-window": ("phi3", {**_GROUPED, "sliding_window": 16}),
    "phi3-longrope": (
        "phi3",
        {**_GROUPED, "original_max_position_embeddings": 64, "rope_scaling": _LONGROPE},
    ),
    "gpt2": ("gpt2", _GPT2),
    "gpt2-eager": ("gpt2", _GPT2),
    "gpt_neox": ("gpt_neox", _COMMON),
    "gpt_neox-half": ("gpt_neox", {**_PARTIAL, "rotary_pct": 0.5}),
    "opt": ("opt", {**_COMMON, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "bloom": ("bloom", {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "smollm3": ("smollm3", {**_GROUPED, "no_rope_layers": [1, 0], "tie_word_embeddings": True}),
    "glm": ("glm", {**_GROUPED, "head_dim": 32}),
    "falcon": ("falcon", _FALCON),
    "gptj": ("gptj", {**_GPT2, "rotary_dim": 8}),
    "granite": ("granite", {**_GROUPED, "attention_multiplier": 0.1, "logits_scaling": 4.0}),
    "olmo2": ("olmo2", _GROUPED),
    "stablelm": ("stablelm", _GROUPED),
    "stablelm-half": (
        "stablelm",
        {**_PARTIAL, "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "use_qkv_bias": True},
    ),
}


@dataclass(frozen=True)
class Family:
    """A tiny model: `folder`/hf has config and weights."""

    name: str
    folder: Path

    @cached_property
    def onnx(self) -> Path:
        """What optimum makes of it by itself: with eager attention if the name ends so, or the default."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from optimum.exporters.onnx import main_export, onnx_export_from_model
            from transformers import AutoModelForCausalLM

            source, output = self.folder / "hf", self.folder / "onnx"
            how: dict[str, Any] = {"task": "text-generation-with-past", "opset": 18, "do_validation": False}
            if self.name.endswith("-eager"):
                model = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
                onnx_export_from_model(model, output, **how)
            else:
                main_export(str(source), output, library_name="transformers", **how)
        return output / "model.onnx"

    @cached_property
    def plain(self) -> PlainGraph:
        """What the product makes of it before anything is fused."""
        (self.folder / "plain").mkdir()
        return convert(self.folder / "hf", self.config, self.folder / "plain")

    @cached_property
    def config(self) -> dict[str, Any]:
        text = (self.folder / "hf" / "config.json").read_text(encoding="utf-8")
        config: dict[str, Any] = json.loads(text)
        return config

    @cached_property
    def _torch_model(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from transformers import AutoModelForCausalLM

            return AutoModelForCausalLM.from_pretrained(self.folder / "hf", attn_implementation="eager").eval()

    def torch_logits(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the logits after each of `tokens`, shape (n, vocab), without any cache."""
        import torch

        with torch.no_grad():
            rows = self._torch_model(torch.from_numpy(tokens[None]), use_cache=False).logits[0]
        logits: NDArray[np.float32] = rows.float().numpy()
        return logits


@cache
def get_family(name: str) -> Family:
    """Return the model `name`, made at its first use. Read only; gone when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="edgespec-family-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return make_family(name, folder)


def make_family(name: str, folder: Path) -> Family:
    """Make the model `name` in `folder`.

    Its weights are large enough for attention to matter, and no bias or norm is left at its initial value.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        model_type, options = FAMILIES[name]
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options)).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.15)
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder / "hf")
    return Family(name, folder)


class SharedCacheRunner:
    """Runs a fused graph as the product does: one buffer for past and present, rollback by a number."""

    def __init__(self, path: Path, capacity: int = CAPACITY) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._cache = {}
        for info in self._session.get_inputs():
            if info.name.startswith("past_key_values."):
                # Stale contents must not matter, so the buffer starts as something absurd.
                buffer = np.full((1, info.shape[1], capacity, info.shape[3]), 1e3, dtype=np.float32)
                self._cache[info.name] = ort.OrtValue.ortvalue_from_numpy(buffer)

    def __call__(self, tokens: NDArray[np.int64], past: int, keep: int) -> NDArray[np.float32]:
        """Feed `tokens` after `past` cached ones; return the last `keep` rows of logits."""
        binding = self._session.io_binding()
        binding.bind_output("logits", "cpu")
        binding.bind_cpu_input("input_ids", np.ascontiguousarray(tokens[None]))
        binding.bind_cpu_input("past_len", np.array([past], dtype=np.int64))
        binding.bind_cpu_input("keep", np.array([keep], dtype=np.int64))
        for name, value in self._cache.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)
        self._session.run_with_iobinding(binding)
        logits: NDArray[np.float32] = binding.get_outputs()[0].numpy()[0]
        return logits


def parity_steps(family: Family, runner: SharedCacheRunner, prefill: int = 40) -> Iterator[tuple[str, Any, Any]]:
    """Yield (step, fused rows, torch rows): prefill, decode, verify 5, roll back 3 and verify 5 others, decode."""
    rng = np.random.default_rng(3)
    text = rng.integers(3, VOCAB, prefill + 6).astype(np.int64)
    other = rng.integers(3, VOCAB, 6).astype(np.int64)
    first, second = text, np.concatenate([text[: prefill + 3], other])
    expected_first, expected_second = family.torch_logits(first), family.torch_logits(second)
    n = prefill
    yield "prefill", runner(first[:n], 0, n), expected_first[:n]
    yield "decode", runner(first[n : n + 1], n, 1), expected_first[n : n + 1]
    yield "verify", runner(first[n + 1 : n + 6], n + 1, 5), expected_first[n + 1 : n + 6]
    yield "rollback", runner(second[n + 3 : n + 8], n + 3, 5), expected_second[n + 3 : n + 8]
    yield "decode again", runner(second[n + 8 :], n + 8, 1), expected_second[n + 8 :]


def largest_difference(family: Family, runner: SharedCacheRunner, prefill: int = 40) -> tuple[float, bool]:
    """Return the largest difference of logits from torch over all steps, and whether every arg max agrees."""
    worst, agrees = 0.0, True
    for _, found, expected in parity_steps(family, runner, prefill):
        assert found.shape == expected.shape
        worst = max(worst, float(np.abs(found - expected).max()))
        agrees = agrees and bool((found.argmax(-1) == expected.argmax(-1)).all())
    return worst, agrees
