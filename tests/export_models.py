"""Tiny random llamas as Hugging Face folders and GGUF files, and torch's opinion of them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny import NUM_TOKENS, SPECIALS, TEMPLATE, tiny_tokenizer

PADDED_VOCAB = NUM_TOKENS + 5
_SHAPE: dict[str, Any] = {
    "vocab_size": PADDED_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


def save_llama(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a random llama with the tiny byte tokenizer, as `save_pretrained` does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries' own imports
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = LlamaForCausalLM(LlamaConfig(**(_SHAPE | changes)))
        model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path, **settings: Any) -> None:
    (folder / "tokenizer.json").write_text(tiny_tokenizer().to_str(), encoding="utf-8")
    all_settings = {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2], "chat_template": TEMPLATE} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(all_settings), encoding="utf-8")


def torch_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Logits of every position, shape (n, vocabulary), by the original."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            return model(torch.from_numpy(tokens)[None]).logits[0].numpy()


def total_variation(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Between next-token distributions, per row, through torch's softmax."""
    import torch

    p, q = (torch.softmax(torch.from_numpy(np.asarray(x, np.float64)), -1) for x in (rows, others))
    return ((p - q).abs().sum(-1) / 2).numpy()


def save_gguf(
    folder: Path, file: Path, pre: str = "gpt-2", kind: str = "gpt2", extra: dict[str, Any] | None = None
) -> Path:
    """The llama of `folder` as llama.cpp's converter would store it: q and k permuted, tokens with their kinds.

    Args:
        pre, kind: names of the pre-tokenizer and of the tokenizer's kind.
        extra: further text entries.
    """
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(file, "llama")
    _write_shape(writer, config)
    for key, value in (extra or {}).items():
        writer.add_string(key, value)
    _write_tokens(writer, pre, kind)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in weights.items():
        for part, count in heads.items():
            if part in name:
                halves = weight.reshape(count, 2, weight.shape[0] // count // 2, weight.shape[1])
                weight = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
        writer.add_tensor(_gguf_name(name), weight.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _write_shape(writer: Any, config: dict[str, Any]) -> None:
    writer.add_name("tiny llama")
    writer.add_license("mit")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _write_tokens(writer: Any, pre: str, kind: str) -> None:
    vocabulary = tiny_tokenizer().get_vocab(True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    padding = [f"[PAD{i}]" for i in range(len(tokens), PADDED_VOCAB)]
    kinds = [3 if token in SPECIALS else 1 for token in tokens] + [5] * len(padding)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + padding)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _gguf_name(name: str) -> str:
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.": "blk.",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
    }
    for theirs, ours in parts.items():
        name = name.replace(theirs, ours)
    return name
