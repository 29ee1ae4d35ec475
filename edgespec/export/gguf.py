"""A GGUF file as a Hugging Face folder: weights, configuration, tokenizer and chat template.

Weights and configuration are read by transformers. The tokenizer is built here from the file's own tables:
transformers rebuilds it by architecture, which adds a wrong begin token, mixes up the special tokens and skips the
pre-tokenizer that the file names. What is not known is refused, because a nearly right tokenizer goes unnoticed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgespec.errors import ExportError

# Token kinds of the GGUF tables.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# `tokenizer.ggml.pre` -> (pattern that cuts words or None for GPT-2's own, one token per digit, NFC first)
_PRE_TOKENIZERS: dict[str, tuple[str | None, bool, bool]] = {
    "gpt-2": (None, False, False),
    "smollm": (None, True, False),
    "llama-bpe": (_WORDS.format(digits="{1,3}"), False, False),
    "qwen2": (_WORDS.format(digits=""), False, True),
}


def unpack_gguf(file: Path, folder: Path) -> str | None:
    """Write `config.json`, `model.safetensors` and the tokenizer's files into `folder`.

    Args:
        file: the `.gguf`.
        folder: an existing, empty one.
    Returns:
        The licence that the file names, or None.
    Raises:
        ExportError: not a GGUF file, or one with parts that cannot be read faithfully.
    """
    fields, tensors = _read(file)
    _refuse_scaled_rotary(file, fields, tensors)
    _write_tokenizer(file, fields, folder)
    _write_weights(file, folder)
    licence = fields.get("general.license")
    return str(licence) if licence else None


def _read(file: Path) -> tuple[dict[str, Any], set[str]]:
    """Metadata by key and the names of the tensors."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise ExportError(f"{file} is not a readable GGUF file ({error}); download it again") from error
    fields = {key: field.contents() for key, field in reader.fields.items()}
    return fields, {tensor.name for tensor in reader.tensors}


def _refuse_scaled_rotary(file: Path, fields: dict[str, Any], tensors: set[str]) -> None:
    """transformers reads neither form of rotary scaling, and the model would be wrong without a word."""
    architecture = fields.get("general.architecture")
    scaling = fields.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or any(name.startswith("rope_") for name in tensors):
        raise ExportError(
            f"{file} scales its rotary embedding, which cannot be read from GGUF; "
            "export the model's Hugging Face folder or hub id instead"
        )


def _write_weights(file: Path, folder: Path) -> None:
    """Dequantise to float32 and save as safetensors, with the configuration beside them.

    Goes below `from_pretrained(gguf_file=...)`, which insists on accelerate.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=skeleton)["tensors"]
    except (ValueError, KeyError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ExportError(
            f"{file}: transformers cannot read this GGUF ({reason}); export the model's Hugging Face folder"
        ) from error
    missing = set(skeleton.state_dict()) - set(tensors) - set(skeleton._tied_weights_keys or ())
    if missing:
        raise ExportError(f"{file} lacks the weight {sorted(missing)[0]}; export the model's Hugging Face folder")
    config.architectures = [type(skeleton).__name__]
    config.torch_dtype = "float32"
    config.save_pretrained(folder)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def _write_tokenizer(file: Path, fields: dict[str, Any], folder: Path) -> None:
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ExportError(
            f"{file} has a tokenizer of kind {kind!r}, and only byte-level BPE ('gpt2') can be read from GGUF; "
            "export the model's Hugging Face folder or hub id instead"
        )
    try:
        build_tokenizer(file, fields).save(str(folder / "tokenizer.json"))
        settings = _settings(fields)
    except ExportError:
        raise
    except Exception as error:  # `tokenizers` raises the bare class where a table contradicts itself
        raise ExportError(
            f"{file}: its tokenizer's tables cannot be read ({error}); export the model's Hugging Face folder instead"
        ) from error
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _settings(fields: dict[str, Any]) -> dict[str, Any]:
    """`tokenizer_config.json`: special tokens by role, and the template."""
    tokens = fields["tokenizer.ggml.tokens"]
    roles = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for theirs, ours in roles.items():
        token_id = fields.get(f"tokenizer.ggml.{theirs}_token_id")
        if token_id is not None:
            settings[f"{ours}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in fields:
        settings["chat_template"] = fields["tokenizer.chat_template"]
    return settings


def build_tokenizer(file: Path, fields: dict[str, Any]) -> Any:
    """The `tokenizers.Tokenizer` that a GGUF with byte-level BPE describes.

    Args:
        file: for messages.
        fields: metadata by key.
    Raises:
        ExportError: the pre-tokenizer is not one that we know.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    pre = fields.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in _PRE_TOKENIZERS:
        raise ExportError(
            f"{file} names the pre-tokenizer {pre!r}; known are {', '.join(_PRE_TOKENIZERS)}; "
            "export the model's Hugging Face folder or hub id instead"
        )
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    # Unused ids are padding rows of the weights under made-up names, which the original's tokenizer does not have.
    vocabulary = {token: i for i, token in enumerate(tokens) if kinds[i] != _UNUSED}
    merges = [tuple(merge.split(" ")) for merge in fields.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if _PRE_TOKENIZERS[pre][2]:
        tokenizer.normalizer = normalizers.NFC()
    for kind in (_CONTROL, _USER_DEFINED):
        tokenizer.add_tokens(
            [
                AddedToken(token, normalized=False, special=kind == _CONTROL)
                for token, token_kind in zip(tokens, kinds, strict=True)
                if token_kind == kind
            ]
        )
    _add_begin_token(tokenizer, fields)
    return tokenizer


def _pre_tokenizer(name: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    pattern, by_digit, _ = _PRE_TOKENIZERS[name]
    parts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if by_digit else []
    if pattern is not None:
        parts.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    return pre_tokenizers.Sequence(parts)


def _add_begin_token(tokenizer: Any, fields: dict[str, Any]) -> None:
    """Where the file asks for it, `encode` puts the begin token first."""
    begin = fields.get("tokenizer.ggml.bos_token_id")
    if not fields.get("tokenizer.ggml.add_bos_token", False) or begin is None:
        return
    from tokenizers.processors import TemplateProcessing

    token = fields["tokenizer.ggml.tokens"][begin]
    tokenizer.post_processor = TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", token, "$B"], special_tokens=[(token, begin)]
    )
