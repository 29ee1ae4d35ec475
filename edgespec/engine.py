"""The wiring: a bundle, its sessions, its tokenizer and template, and the streams of text that they give.

`load` -> `Engine` -> `TextStream`. Knows neither the terminal nor how bundles are made.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy as np

from edgespec.bundle import Bundle, ModelInfo, check_vocab, default_bundle_path, read_bundle
from edgespec.chat import ChatTemplate
from edgespec.contracts import Drafter, Tokens
from edgespec.decoder import FinishReason, SpeculativeDecoder
from edgespec.drafters import ModelDrafter, NgramDrafter
from edgespec.errors import BundleError, BusyError, ConfigError, SessionError
from edgespec.params import RowInvariance, RuntimeParams, SamplingParams, SpecParams
from edgespec.stats import GenerationStats
from edgespec.tokens import StreamDecoder, Tokenizer


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    spec: SpecParams | None = None,
    runtime: RuntimeParams | None = None,
) -> Engine:
    """Load a bundle.

    Args:
        path: folder of the bundle; `None` is the default bundle in the user's cache.
        spec: which drafter, and how many tokens it proposes.
        runtime: provider, threads, exact mode.
    Raises:
        BundleError: the bundle is missing, damaged or foreign.
        ConfigError: a parameter does not go with the bundle.
        SessionError: ONNX Runtime cannot run it as asked.
        MissingExtraError: onnxruntime is not installed.
    """
    runtime = runtime or RuntimeParams()
    bundle = read_bundle(default_bundle_path() if path is None else path, verify_hashes=runtime.verify_hashes)
    return Engine(bundle, spec or SpecParams(), runtime)


class Engine:
    """A loaded bundle. Makes one answer at a time; may be used from any thread.

    Attributes:
        bundle: what was loaded.
        drafter: the drafter in use: `model`, `ngram` or `none`.
        row_rule: the rule that exact mode keeps, or `None` without it.
        tokenizer: of the bundle.
    """

    def __init__(self, bundle: Bundle, spec: SpecParams, runtime: RuntimeParams) -> None:
        manifest = bundle.manifest
        self.bundle = bundle
        self.drafter = _choose_drafter(spec, has_model=manifest.draft is not None)
        self.tokenizer = Tokenizer(bundle.path / manifest.tokenizer)
        check_vocab(manifest, self.tokenizer.vocab_size)
        self._template = _read_template(bundle)
        if runtime.spinning == "auto":
            runtime = replace(runtime, spinning="off" if self.drafter == "model" else "stop")
        self._open(spec, runtime)
        self._lock = threading.Lock()
        self._is_closed = False

    def _open(self, spec: SpecParams, runtime: RuntimeParams) -> None:
        # Importing onnxruntime takes longer than all the rest of `import edgespec`.
        from edgespec.invariance import measure_row_invariance
        from edgespec.session import DecoderSession

        def open_model(info: ModelInfo) -> DecoderSession:
            path = self.bundle.path / info.path
            return DecoderSession(path, context_length=info.context_length, runtime=runtime)

        target = open_model(self.bundle.manifest.target)
        self._sessions = [target]
        self.row_rule: RowInvariance | None = None
        if runtime.exact:
            self.row_rule = measure_row_invariance(target)
            if self.row_rule == "none":
                raise SessionError(
                    f"{self.bundle.path}: exact mode cannot be had with this graph on this machine: "
                    "its logits depend on how many rows share a call. Load it without exact mode"
                )
            target.row_rule = self.row_rule
        drafter: Drafter | None = None
        if self.drafter == "model" and self.bundle.manifest.draft is not None:
            self._sessions.append(open_model(self.bundle.manifest.draft))
            drafter = ModelDrafter(self._sessions[-1], target.vocab_size)
        elif self.drafter == "ngram":
            drafter = NgramDrafter(spec.max_ngram)
        self._decoder = SpeculativeDecoder(
            target,
            drafter,
            num_draft_tokens=spec.num_draft_tokens,
            eos_token_ids=self.bundle.manifest.eos_token_ids,
            prefill_chunk=runtime.prefill_chunk,
        )

    @property
    def providers(self) -> tuple[str, ...]:
        """ONNX Runtime's name of the provider of each session, target first."""
        return tuple(s.provider for s in self._sessions)

    @property
    def context_length(self) -> int:
        """Most tokens that a prompt and its answer may have together."""
        return self._decoder.target.context_length

    def chat(self, messages: Sequence[Mapping[str, str]], params: SamplingParams | None = None) -> TextStream:
        """Answer a conversation.

        What the caches already hold of it is not read again, so passing the whole conversation each turn is cheap.

        Args:
            messages: `{"role": "system" | "user" | "assistant", "content": text}`, oldest first.
            params: how the answer is sampled; greedy by default.
        Raises:
            ConfigError: the messages do not fit the template, or the bundle has none.
        """
        if self._template is None:
            raise ConfigError(f"{self.bundle.path} has no chat template: use generate() with plain text")
        text = self._template.render(messages, add_generation_prompt=True)
        return self._stream(self.tokenizer.encode(text, add_special_tokens=False), params, is_continued=False)

    def generate(self, prompt: str | Sequence[int] | Tokens, params: SamplingParams | None = None) -> TextStream:
        """Continue a text, or token ids of shape (n,), as they are: no template.

        Raises:
            ConfigError: the prompt is empty, or an id is not in the vocabulary.
        """
        if isinstance(prompt, str):
            tokens = self.tokenizer.encode(prompt, add_special_tokens=True)
        else:
            tokens = np.asarray(prompt, np.int64).reshape(-1)
        if not len(tokens):
            raise ConfigError("the prompt is empty: give it at least one token")
        vocab_size = self.bundle.manifest.target.vocab_size
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise ConfigError(f"the prompt has token ids outside the vocabulary of {vocab_size}")
        return self._stream(tokens, params, is_continued=True)

    def close(self) -> None:
        """Release the sessions and caches. Closing twice is fine; using the engine afterwards is an error.

        Raises:
            BusyError: an answer is being made; cancel or close its stream first.
        """
        self._acquire()
        try:
            if not self._is_closed:
                self._is_closed = True
                for session in self._sessions:
                    session.close()
        finally:
            self._lock.release()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream(self, tokens: Tokens, params: SamplingParams | None, *, is_continued: bool) -> TextStream:
        return TextStream(self, tokens, params or SamplingParams(), tokens[-16:] if is_continued else tokens[:0])

    def _acquire(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise BusyError("the engine is making another answer: finish, cancel or close that stream first")


class TextStream:
    """An answer while it is made: iterate it for pieces of text.

    Leaving the loop early and closing the stream (or leaving its `with` block, or dropping it) frees the engine.

    Attributes:
        stats: counters and rates, valid at any time.
        token_ids: of the answer so far, an end token included.
        finish_reason: `eos`, `stop`, `length`, `context` or `cancelled`; `None` until the end.
    """

    def __init__(self, engine: Engine, prompt: Tokens, params: SamplingParams, context: Tokens) -> None:
        self.stats = GenerationStats()
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._pieces: list[str] = []
        self._cancelled = threading.Event()
        self._decoder = StreamDecoder(engine.tokenizer, params.stop, context)
        self._iterator = self._run(engine, prompt, params)

    def __iter__(self) -> Iterator[str]:
        return self._iterator

    def text(self) -> str:
        """The whole answer, waiting for what is not there yet."""
        for _ in self._iterator:
            pass
        return "".join(self._pieces)

    def cancel(self) -> None:
        """End the answer after the call of a model that is under way. From any thread, at any time."""
        self._cancelled.set()

    def close(self) -> None:
        """End the answer here and free the engine. For the thread that iterates."""
        self._iterator.close()
        self.finish_reason = self.finish_reason or "cancelled"

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, engine: Engine, prompt: Tokens, params: SamplingParams) -> Generator[str, None, None]:
        engine._acquire()
        try:
            if engine._is_closed:
                raise ConfigError("the engine is closed: load the bundle again")
            for step in engine._decoder.generate(prompt, params, self.stats, self._cancelled.is_set):
                piece = self._decoder.push(step.tokens)
                self.token_ids += step.tokens
                finish = self._stopped() or step.finish
                if finish is not None:
                    piece += self._decoder.flush()
                    self.finish_reason = finish
                if piece:
                    self._pieces.append(piece)
                    yield piece
                if finish is not None:
                    return
        finally:
            engine._lock.release()

    def _stopped(self) -> FinishReason | None:
        """Forget tokens behind a stop string."""
        if not self._decoder.stopped:
            return None
        del self.token_ids[self._decoder.num_tokens :]
        self.stats.new_tokens = len(self.token_ids)
        return "stop"


def _choose_drafter(spec: SpecParams, *, has_model: bool) -> str:
    if spec.num_draft_tokens == 0:
        return "none"
    if spec.drafter == "auto":
        return "model" if has_model else "ngram"
    if spec.drafter == "model" and not has_model:
        raise ConfigError("the bundle has no draft model: use the drafter `ngram`, or export it with --draft")
    return spec.drafter


def _read_template(bundle: Bundle) -> ChatTemplate | None:
    name = bundle.manifest.chat_template
    if name is None:
        return None
    try:
        source = Path(bundle.path / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{bundle.path / name} cannot be read as text: {error}") from error
    return ChatTemplate(source, bundle.manifest.special_tokens)
