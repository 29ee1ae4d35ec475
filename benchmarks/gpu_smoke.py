"""One GPU in a few minutes: export a random pair, then parity, rollback and speed of draft and target on it.

    python benchmarks/gpu_smoke.py                      # 1.5 billion parameters in fp16, a draft of 0.1, on CUDA
    python benchmarks/gpu_smoke.py --dry-run            # tiny models on the CPU: that the script itself works

Needs the extras `gpu` and `export`. Weights are random, so acceptance means nothing here; every figure is of one run on
the machine that is named beside it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import edgespec
from edgespec import RuntimeParams, SamplingParams, SpecParams
from edgespec.bundle import ModelInfo
from edgespec.export import export_bundle
from edgespec.ort import one_line, runtime_version
from edgespec.session import DecoderSession

SIZES: dict[str, dict[str, Any]] = {
    "target": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 22, "num_attention_heads": 32},
    "draft": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12},
}
TINY: dict[str, dict[str, Any]] = {
    "target": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4},
    "draft": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4},
}
TOLERANCE = {"fp16": 0.02, "fp32": 1e-3, "int4": 0.2, "int8": 0.1}  # mean total variation to the CPU


def main() -> int:
    options = parse()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="edgespec-gpu-") as name:
        folder = Path(name)
        sizes = TINY if options.dry_run else SIZES
        sources = {role: save_random(folder / role, seed, **sizes[role]) for seed, role in enumerate(sizes)}
        report = export_bundle(
            str(sources["target"]),
            folder / "bundle",
            draft=str(sources["draft"]),
            precision=options.precision,
            draft_precision=options.draft_precision,
            max_context=2048 if not options.dry_run else 256,
        )
        say("export", seconds=report.seconds, peak_memory=report.peak_memory, size=report.size)
        failures = measure(report.path, report.manifest, options.provider)
    where = {"onnxruntime": runtime_version(), "machine": platform.machine(), "provider": options.provider}
    say("done", seconds=time.monotonic() - started, failures=failures, **where)
    return int(bool(failures))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--provider", help="cuda, or cpu in a dry run")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--draft-precision", default="fp16")
    options = parser.parse_args()
    options.provider = options.provider or ("cpu" if options.dry_run else "cuda")
    return options


def say(what: str, **figures: Any) -> None:
    """One JSON line."""
    print(json.dumps({"what": what, **figures}), flush=True)


def measure(path: Path, manifest: edgespec.Manifest, provider: str) -> list[str]:
    """Parity and rollback of each model, speed of its calls, and a whole answer; names of what failed."""
    failures = []
    roles = {"target": manifest.target, "draft": manifest.draft}
    for role, info in roles.items():
        assert info is not None
        found = compare(path, info, provider)
        say(f"{role} against the CPU", **found)
        failures += [f"{role} {key}" for key in ("parity", "rollback") if not found[key] <= TOLERANCE[info.precision]]
        for pinned in (False, True):
            words = ", rows in pinned memory" if pinned else ""
            say(f"{role} ms by rows of a call{words}", **speeds(path, info, provider, pinned))
    say("CUDA graph", refused=refusal_of_capture(path / manifest.target.path, provider))
    return failures + answers(path, provider)


def answers(path: Path, provider: str) -> list[str]:
    """Greedy answers without a draft, with it, and with either model on the CPU; names of those that failed."""
    runtimes = {
        "drafter none": ("none", RuntimeParams(provider=provider)),
        "drafter model": ("model", RuntimeParams(provider=provider)),
        "draft on the CPU": ("model", RuntimeParams(provider=provider, draft_provider="cpu")),
        "target on the CPU": ("model", RuntimeParams(provider="cpu", draft_provider=provider)),
    }
    texts, failures = {}, []
    for name, (drafter, runtime) in runtimes.items():
        try:
            texts[name], figures = answer(path, drafter, replace(runtime, map_weights=False))
            say(f"answer, {name}", **figures)
        except edgespec.EdgespecError as error:
            say(f"answer, {name}", error=str(error))
            failures.append(name)
    say("greedy text", is_equal=texts.get("drafter none") == texts.get("drafter model"))
    return failures


def refusal_of_capture(path: Path, provider: str) -> str | None:
    """What ONNX Runtime says to capturing the target as a CUDA graph; None if it would do it."""
    import onnxruntime

    if provider != "cuda":
        return "only CUDA captures"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        settings = {"enable_cuda_graph": "1"}
        onnxruntime.InferenceSession(str(path), options, providers=[("CUDAExecutionProvider", settings)])
    except Exception as error:  # onnxruntime's exceptions share no base class but this one
        return one_line(error)
    return None


def open_model(path: Path, info: ModelInfo, provider: str, pinned: bool = False) -> DecoderSession:
    runtime = RuntimeParams(provider=provider, pinned_logits=pinned)
    return DecoderSession(path / info.path, context_length=info.context_length, runtime=runtime)


def compare(path: Path, info: ModelInfo, provider: str) -> dict[str, float]:
    """Mean total variation to the CPU of reading a prompt, and of verifying after a rejected draft."""
    tokens = np.random.default_rng(0).integers(3, 259, 72)
    rows = {}
    for name in ("cpu", provider):
        with closing(open_model(path, info, name)) as session:
            read = session.forward(tokens[:64], 64).copy()
            session.forward(tokens[:5], 5)  # a draft that is rejected
            session.rewind(64)
            rows[name] = read, session.forward(tokens[64:], 8).copy()
    pairs = zip(rows["cpu"], rows[provider], strict=True)
    parity, rollback = (total_variation(ours, theirs) for ours, theirs in pairs)
    return {"parity": parity, "rollback": rollback}


def total_variation(rows: np.ndarray, others: np.ndarray) -> float:
    p, q = (np.exp(x - x.max(-1, keepdims=True), dtype=np.float64) for x in (rows, others))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    return float(np.abs(p - q).sum(-1).mean() / 2)


def speeds(path: Path, info: ModelInfo, provider: str, pinned: bool) -> dict[str, Any]:
    """Median milliseconds of calls with 1, 2, 5 and 9 rows after 128 tokens, or why there are none."""
    try:
        return _speeds(path, info, provider, pinned)
    except edgespec.SessionError as error:
        return {"error": str(error)}


def _speeds(path: Path, info: ModelInfo, provider: str, pinned: bool) -> dict[str, float]:
    tokens = np.random.default_rng(0).integers(3, 259, 140)
    with closing(open_model(path, info, provider, pinned)) as session:
        session.forward(tokens[:128], 1)
        found = {}
        for width in (1, 2, 5, 9):
            times = []
            for _ in range(12):
                started = time.perf_counter()
                session.forward(tokens[128 : 128 + width], width)
                times.append(time.perf_counter() - started)
                session.rewind(128)
            found[str(width)] = round(statistics.median(times[2:]) * 1e3, 3)
    return found


def answer(path: Path, drafter: str, runtime: RuntimeParams) -> tuple[list[int], dict[str, Any]]:
    """A greedy answer, and what it took."""
    # Half precision is slow on a CPU.
    is_slow = runtime.provider == "cpu" and runtime.draft_provider == "cuda"
    params = SamplingParams(max_new_tokens=8 if is_slow else 48, ignore_eos=True)
    spec = SpecParams(drafter=drafter)
    with edgespec.load(path, spec=spec, runtime=runtime) as engine, engine.generate("once upon a time", params) as text:
        text.text()
        return list(text.token_ids), {"tokens_per_s": text.stats.tokens_per_s, "accepted": text.stats.accepted}


def save_random(folder: Path, seed: int, **shape: Any) -> Path:
    """A random llama in half precision with a byte tokenizer, layer by layer."""
    from safetensors.numpy import save_file

    width, inner, layers = (shape[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    keys = width // 4
    rng = np.random.default_rng(seed)

    def weight(*size: int, scale: float = 0.02) -> np.ndarray:
        return (rng.standard_normal(size, dtype=np.float32) * scale).astype(np.float16)

    folder.mkdir()
    norm = np.ones(width, np.float16)
    head = {"model.embed_tokens.weight": weight(32000, width, scale=1.0), "model.norm.weight": norm}
    save_file(head | {"lm_head.weight": weight(32000, width)}, folder / "model-head.safetensors")
    sizes = {"self_attn.q_proj": (width, width), "self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width)}
    sizes |= {"self_attn.o_proj": (width, width), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width)}
    sizes |= {"mlp.down_proj": (width, inner)}
    for i in range(layers):
        start = f"model.layers.{i}."
        made = {f"{start}{name}.weight": weight(*size) for name, size in sizes.items()}
        made |= {f"{start}{name}.weight": norm for name in ("input_layernorm", "post_attention_layernorm")}
        save_file(made, folder / f"model-{i:03}.safetensors")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "eos_token_id": 2}
    config |= {"num_key_value_heads": shape["num_attention_heads"] // 4, "max_position_embeddings": 4096, **shape}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    specials = ["<pad>", "<s>", "</s>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*specials, *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
