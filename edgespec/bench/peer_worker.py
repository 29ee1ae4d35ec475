"""The other side of `peers.Peer`: a script for any Python that has the engine installed. Imports nothing of ours.

    python peer_worker.py ENGINE

The first line in is `{"model", "draft", "threads"}`, the first out `{"modes", "version"}`; then a job a line, and its
answer. An error is `{"error": text}`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


class GenAI:
    """onnxruntime-genai: plain, its n-gram lookup, and its draft model if it is given one."""

    def __init__(self, model: str, draft: str | None, threads: int | None) -> None:
        import onnxruntime_genai as og

        self._og = og
        if hasattr(og, "disable_telemetry_events"):
            og.disable_telemetry_events()
        self.version = str(og.__version__)
        session = {} if threads is None else {"intra_op_num_threads": threads}
        alone = self._open(model, session)
        options: dict[str, dict[str, Any]] = {"plain": {}}
        if hasattr(og.GeneratorParams, "set_speculative_options"):
            options["ngram 4"] = {"ngram_size": 3, "max_draft_tokens": 4}
            options["ngram adaptive"] = {"ngram_size": 3, "min_adaptive_k": 1, "ngram_chained_lookup": True}
        self._modes = {mode: (alone, chosen) for mode, chosen in options.items()}
        if draft is not None and len(options) > 1:
            self._add_draft(model, draft, session)
        self.modes = list(self._modes)

    def _open(self, folder: str, session: dict[str, Any], *parts: str) -> Any:
        config = self._og.Config(folder)
        for part in parts or ("decoder",):
            config.overlay(json.dumps({"model": {part: {"session_options": session}}}))
        return self._og.Model(config)

    def _add_draft(self, model: str, draft: str, session: dict[str, Any]) -> None:
        """With threads that spin, as is its default, and with threads that do not, which is better for two models."""
        calm = session | {"session.intra_op.allow_spinning": "0"}
        # As long as the models are used: their weights may be read late.
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        folder = self._folder.name
        self._join(Path(model), Path(draft), Path(folder))
        pair, calm_pair = (self._open(folder, chosen, "decoder", "draft") for chosen in (session, calm))
        self._modes["draft 4"] = pair, {"max_draft_tokens": 4}
        self._modes["draft adaptive, no spinning"] = calm_pair, {"min_adaptive_k": 1}

    @staticmethod
    def _join(model: Path, draft: Path, folder: Path) -> None:
        """A folder of both: the target's configuration, with the draft's decoder as `draft`.

        Paths must not lead out of it, so the graphs are linked into it, or copied where links cannot be had.
        """
        _link_files(model, folder)
        joined, other = (json.loads((f / "genai_config.json").read_text(encoding="utf-8")) for f in (model, draft))
        joined["model"]["draft"] = other["model"]["decoder"]
        for name, source in (("decoder", model), ("draft", draft)):
            (folder / name).mkdir()
            _link_files(source, folder / name)
            joined["model"][name]["filename"] = f"{name}/{joined['model'][name]['filename']}"
        config = folder / "genai_config.json"
        config.unlink()  # it is a link to the target's own
        config.write_text(json.dumps(joined), encoding="utf-8")

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

        model, chosen = self._modes[job["mode"]]
        prompt = np.array(job["prompt"], np.int32)
        params = self._og.GeneratorParams(model)
        params.set_search_options(max_length=len(prompt) + job["max_new_tokens"], **self._sampling(job))
        if chosen:
            params.set_speculative_options(**chosen)
        token_ids: list[int] = []
        started = time.perf_counter()
        generator = self._og.Generator(model, params)
        generator.append_tokens(prompt)
        first = 0.0
        while not generator.is_done():
            generator.generate_next_token()
            token_ids += [int(token) for token in generator.get_next_tokens()]
            first = first or time.perf_counter() - started
        timed = {"token_ids": token_ids, "seconds": time.perf_counter() - started, "first_token_s": first}
        if not chosen:
            return timed | {"target_passes": len(token_ids)}
        stats = generator.get_speculative_stats()
        passes = stats["target_forward_passes"] + stats["standard_fallback_steps"]
        counts = {"drafted": stats["draft_tokens_proposed"], "accepted": stats["draft_tokens_accepted"]}
        return timed | counts | {"target_passes": passes}

    @staticmethod
    def _sampling(job: dict[str, Any]) -> dict[str, Any]:
        if job["temperature"] == 0:
            return {"do_sample": False}
        cuts = {"temperature": job["temperature"], "top_p": job["top_p"], "top_k": 0}
        return {"do_sample": True, "random_seed": job["seed"] or 0, **cuts}


def _link_files(source: Path, folder: Path) -> None:
    for path in source.iterdir():
        if path.is_file():
            try:
                os.link(path, folder / path.name)
            except OSError:
                shutil.copyfile(path, folder / path.name)


class Transformers:
    """transformers on torch: plain, and its prompt lookup."""

    modes = ("plain", "lookup 3", "lookup 10")

    def __init__(self, model: str, draft: str | None, threads: int | None) -> None:
        import torch
        import transformers

        if draft is not None:
            raise ValueError("transformers is measured with prompt lookup, not with a draft model")
        self._torch, self.version = torch, str(transformers.__version__)
        if threads is not None:
            torch.set_num_threads(threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, local_files_only=True)
        # Newer releases keep the precision of the file, which few CPUs compute fast in.
        self._model.float().eval()

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        self._torch.manual_seed(job["seed"] or 0)
        prompt = self._torch.tensor([job["prompt"]])
        clock = _FirstCall()
        options: dict[str, Any] = {"do_sample": job["temperature"] > 0, "max_new_tokens": job["max_new_tokens"]}
        if options["do_sample"]:
            options |= {"temperature": job["temperature"], "top_p": job["top_p"], "top_k": 0}
        if job["mode"] != "plain":
            options["prompt_lookup_num_tokens"] = int(job["mode"].split()[1])
        mask = self._torch.ones_like(prompt)
        started = time.perf_counter()
        with self._torch.inference_mode():
            text = self._model.generate(prompt, attention_mask=mask, stopping_criteria=[clock], **options)
        seconds = time.perf_counter() - started
        token_ids = text[0, prompt.shape[1] :].tolist()
        return {"token_ids": token_ids, "seconds": seconds, "first_token_s": (clock.at or started) - started}


class _FirstCall:
    """A stopping criterion that never stops, and remembers when it was asked first: with the first tokens."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: Any, scores: Any, **extra: Any) -> Any:
        self.at = self.at or time.perf_counter()
        return input_ids.new_zeros(input_ids.shape[0], dtype=bool)


class OpenVINO:
    """OpenVINO GenAI: plain, its prompt lookup, and its draft model if it is given one."""

    def __init__(self, model: str, draft: str | None, threads: int | None) -> None:
        import openvino_genai as og

        self._og, self.version = og, str(og.__version__)
        options = {} if threads is None else {"INFERENCE_NUM_THREADS": threads}
        self._modes: dict[str, tuple[Any, dict[str, Any]]] = {"plain": (og.LLMPipeline(model, "CPU", **options), {})}
        lookup = og.LLMPipeline(model, "CPU", prompt_lookup=True, **options)
        self._modes["lookup 5"] = lookup, {"num_assistant_tokens": 5, "max_ngram_size": 3}
        if draft is not None:
            pair = og.LLMPipeline(model, "CPU", draft_model=og.draft_model(draft, "CPU", **options), **options)
            self._modes["draft 4"] = pair, {"num_assistant_tokens": 4}
            self._modes["draft adaptive"] = pair, {"assistant_confidence_threshold": 0.4}
        self.modes = list(self._modes)

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        import numpy as np
        import openvino as ov

        pipeline, chosen = self._modes[job["mode"]]
        config = self._og.GenerationConfig()
        config.max_new_tokens = job["max_new_tokens"]
        config.set_eos_token_id(pipeline.get_tokenizer().get_eos_token_id())
        if job["temperature"] > 0:
            config.do_sample, config.rng_seed = True, job["seed"] or 0
            config.temperature, config.top_p, config.top_k = job["temperature"], job["top_p"], 0
        for name, value in chosen.items():
            setattr(config, name, value)
        ids = np.array([job["prompt"]], np.int64)
        inputs = self._og.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        started = time.perf_counter()
        found = pipeline.generate(inputs, config)
        seconds = time.perf_counter() - started
        first = found.perf_metrics.get_ttft().mean / 1000
        return {"token_ids": [int(token) for token in found.tokens[0]], "seconds": seconds, "first_token_s": first}


class LlamaCpp:
    """llama.cpp by llama-cpp-python: plain, and the prompt lookup of that package."""

    modes = ("plain", "lookup 2", "lookup 10")

    def __init__(self, model: str, draft: str | None, threads: int | None) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        if draft is not None:
            raise ValueError("llama-cpp-python has prompt lookup, but no draft model")
        self.version = str(llama_cpp.__version__)
        options: dict[str, Any] = {"n_ctx": 0, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
        drafts = {
            mode: {"draft_model": LlamaPromptLookupDecoding(num_pred_tokens=int(mode.split()[1]))}
            for mode in self.modes[1:]
        }
        self._models = {mode: llama_cpp.Llama(model, **options, **drafts.get(mode, {})) for mode in self.modes}

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        model = self._models[job["mode"]]
        model.reset()  # or it would keep what this prompt has in common with the one before
        model.set_seed(job["seed"] or 0)
        cuts = {"temp": job["temperature"], "top_p": job["top_p"], "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}
        token_ids: list[int] = []
        started = time.perf_counter()
        first = 0.0
        for token in model.generate(job["prompt"], **cuts):
            first = first or time.perf_counter() - started
            token_ids.append(int(token))
            if len(token_ids) == job["max_new_tokens"] or token == model.token_eos():
                break
        return {"token_ids": token_ids, "seconds": time.perf_counter() - started, "first_token_s": first}


ENGINES = {"onnxruntime-genai": GenAI, "transformers": Transformers, "openvino": OpenVINO, "llama-cpp": LlamaCpp}


def peak_bytes() -> int | None:
    """Most memory that this process has held resident, where the system tells."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    peaks = [line for line in status.read_text(encoding="ascii", errors="replace").splitlines() if "VmHWM" in line]
    return int(peaks[0].split()[1]) * 1024 if peaks else None


def main() -> None:
    # What the libraries print to stdout goes to stderr: stdout belongs to the answers.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    engine: Any = None
    for line in sys.stdin:
        job = json.loads(line)
        try:
            if engine is None:
                engine = ENGINES[sys.argv[1]](job["model"], job["draft"], job["threads"])
                found: dict[str, Any] = {"modes": list(engine.modes), "version": engine.version}
            elif job["mode"] == "peak":
                found = {"peak_bytes": peak_bytes()}
            else:
                found = engine.answer(job)
        except ImportError as error:
            found = {"error": f"{error.name or error} is not installed in {sys.executable}"}
        except Exception as error:
            found = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        out.write(json.dumps(found) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
