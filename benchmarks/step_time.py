"""Time of one call of several graphs of the same model, interleaved in one process.

    python benchmarks/step_time.py ours=BUNDLE/target/model.onnx genai=FOLDER/model.onnx plain=EXPORT/model.onnx

Graphs may be ours (shared cache, `past_len`), onnxruntime-genai's (shared cache, `attention_mask`) or plain exports
(growing cache). The first is the reference of the ratios. Equality: the arg max of the last row after the same
text is compared with the first graph's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime as ort
from common import interleave, paired_ratio, write_jsonl

CAPACITY = 1280


class Graph:
    """A decoder graph with everything bound for calls of `rows` tokens after `past` tokens."""

    def __init__(self, path: Path, threads: int, spinning: str, head_size: int) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        if spinning == "off":
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        elif spinning == "stop":
            options.add_session_config_entry("session.force_spinning_stop", "1")
        self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.inputs = {i.name: i for i in self.session.get_inputs()}
        self.outputs = {o.name: o for o in self.session.get_outputs()}
        ops = "past_len" in self.inputs
        # Plain exports concatenate; a graph without position ids and past length shares its buffer.
        self.shared = ops or "position_ids" not in self.inputs
        self.caches: dict[str, np.ndarray] = {}
        for name, info in self.inputs.items():
            if name.startswith("past_key_values."):
                size = info.shape[3] if isinstance(info.shape[3], int) else head_size
                shape = (1, info.shape[1], CAPACITY if self.shared else 0, size)
                self.caches[name] = np.zeros(shape, np.float32)

    def read(self, tokens: np.ndarray) -> int:
        """Fill the cache with `tokens` and return the arg max after them."""
        for name, cache in self.caches.items():
            shape = list(cache.shape)
            shape[2] = CAPACITY if self.shared else 0
            self.caches[name] = np.zeros(shape, np.float32)
        run = self.prepare(tokens, 0)
        run()
        if not self.shared:
            for name in self.caches:
                self.caches[name] = self.presents[name]
        return int(self.logits[0, -1].argmax())

    def prepare(self, tokens: np.ndarray, past: int) -> Any:
        """A function that runs the call again and again on the same cache."""
        size, total = len(tokens), past + len(tokens)
        feeds = {
            "input_ids": tokens[None],
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(past, total, dtype=np.int64)[None],
            "past_len": np.array([past]),
            "keep": np.array([size]),
        }
        binding = self.session.io_binding()
        self.keepalive = {n: np.ascontiguousarray(v) for n, v in feeds.items() if n in self.inputs}
        make = ort.OrtValue.ortvalue_from_numpy
        for name, value in self.keepalive.items():
            binding.bind_ortvalue_input(name, make(value))
        self.logits = np.empty((1, size, self.outputs["logits"].shape[-1]), np.float32)
        binding.bind_ortvalue_output("logits", make(self.logits))
        self.presents = {}
        for name, cache in self.caches.items():
            present = cache
            if not self.shared:
                present = np.empty((1, cache.shape[1], total, cache.shape[3]), np.float32)
            self.presents[name] = present
            binding.bind_ortvalue_input(name, make(cache))
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), make(present))
        return lambda: self.session.run_with_iobinding(binding)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="+", metavar="NAME=PATH")
    parser.add_argument("--past", type=int, nargs="+", default=[16, 256, 1024])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--spinning", choices=["on", "off", "stop"], default="stop")
    parser.add_argument("--head-size", type=int, default=64, help="where a graph does not say")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    paths = dict(item.split("=", 1) for item in options.graphs)
    graphs = {
        name: Graph(Path(path), options.threads, options.spinning, options.head_size) for name, path in paths.items()
    }
    tokens = np.random.default_rng(0).integers(10, 1000, max(options.past) + max(options.rows))
    results = []
    for past in options.past:
        best = {name: graph.read(tokens[:past]) for name, graph in graphs.items()}
        for rows in options.rows:
            calls = {name: graph.prepare(tokens[past : past + rows], past) for name, graph in graphs.items()}
            times = interleave(calls, options.rounds)
            reference = next(iter(times))
            for name, seconds in times.items():
                row = {
                    "graph": name,
                    "past": past,
                    "rows": rows,
                    "ms": round(median(seconds) * 1e3, 3),
                    "ratio_of_first_to_this": round(paired_ratio(times[reference], seconds), 3),
                    "same_arg_max_as_first": best[name] == best[reference],
                    "trials_ms": [round(s * 1e3, 3) for s in seconds],
                }
                results.append(row)
                print({k: v for k, v in row.items() if k != "trials_ms"}, flush=True)
    if options.output:
        write_jsonl(options.output, results)


if __name__ == "__main__":
    main()
