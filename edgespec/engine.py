"""The wiring: a bundle, its sessions, its tokenizer and template, and the streams of text that they give.

`load` -> `Engine` -> `TextStream`. Knows neither the terminal nor how bundles are made.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.aio import AsyncTextStream
from edgespec.answer import Answer
from edgespec.bundle import Bundle, check_vocab, default_bundle_path, read_bundle
from edgespec.chat import Message
from edgespec.contracts import Drafter, DraftPolicy, Tokens
from edgespec.decoder import SpeculativeDecoder, Step
from edgespec.errors import SessionError
from edgespec.gate import Gate
from edgespec.params import RequestParams, RowInvariance, RuntimeParams, SamplingParams, SpecParams
from edgespec.prompts import Prompt, PromptMaker
from edgespec.speculation import Models, choose_drafters, make_drafting, resolve_runtime
from edgespec.state import CacheFile, bundle_digest, read_caches, write_caches
from edgespec.stats import GenerationStats
from edgespec.stream import TextStream
from edgespec.tokens import Tokenizer

if TYPE_CHECKING:
    from edgespec.models import DraftSession
    from edgespec.ort import Interrupt
    from edgespec.recurrent import RecurrentSession
    from edgespec.session import DecoderSession

MakePrompt = Callable[[SamplingParams, RequestParams], Prompt]


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    spec: SpecParams | None = None,
    runtime: RuntimeParams | None = None,
    drafters: Mapping[str, Drafter] | None = None,
) -> Engine:
    """Load a bundle.

    Args:
        path: folder of the bundle; `None` is the default bundle in the user's cache.
        spec: which drafter, and how many tokens it proposes.
        runtime: provider, threads, exact mode.
        drafters: drafters of the application's own, by name; they join the chain.
    Raises:
        BundleError: the bundle is missing, damaged or foreign.
        ConfigError: a parameter does not go with the bundle.
        SessionError: ONNX Runtime cannot run it as asked.
        MissingExtraError: onnxruntime is not installed.
    """
    runtime = runtime or RuntimeParams()
    bundle = read_bundle(default_bundle_path() if path is None else path, verify_hashes=runtime.verify_hashes)
    return Engine(bundle, spec or SpecParams(), runtime, drafters)


class Engine:
    """A loaded bundle. Makes one answer at a time; may be used from any thread.

    Attributes:
        bundle: what was loaded.
        drafters: names of the drafters in use, of which one drafts in a round; none for plain decoding.
        row_rule: the rule that exact mode keeps, or `None` without it.
        tokenizer: of the bundle.
        prompts: makes the prompts of its answers.
        gate: who is using the engine.
    """

    def __init__(
        self,
        bundle: Bundle,
        spec: SpecParams,
        runtime: RuntimeParams,
        drafters: Mapping[str, Drafter] | None = None,
        *,
        parent: Engine | None = None,
    ) -> None:
        manifest, drafters = bundle.manifest, drafters or {}
        self.bundle = bundle
        self.drafters = choose_drafters(spec, drafters, has_model=manifest.draft is not None)
        if parent is None:
            self.tokenizer = Tokenizer(bundle.path / manifest.tokenizer)
            check_vocab(manifest, self.tokenizer.vocab_size)
            prompts = PromptMaker(bundle, self.tokenizer)
        else:
            self.tokenizer = parent.tokenizer
            prompts = parent.prompts
        has_draft = "model" in self.drafters
        if parent is None and runtime.spinning == "auto":
            from edgespec import tuning

            tuning.advise_at_first_load(bundle, runtime, has_draft=has_draft)
        runtime = resolve_runtime(runtime, manifest, has_draft=has_draft)
        self._spec, self._runtime, self._extra_drafters = spec, runtime, drafters
        self._open(spec, runtime, parent)
        self.prompts: PromptMaker = prompts.limited(self.context_length)
        self.gate = Gate()
        # Also runs at the end of the interpreter, before threads that are in a call are killed.
        weakref.finalize(self, self.gate.shut_down)

    def _open(self, spec: SpecParams, runtime: RuntimeParams, parent: Engine | None) -> None:
        # Importing onnxruntime takes longer than all the rest of `import edgespec`.
        from edgespec.models import fork_draft, open_draft, open_inner_draft, open_target
        from edgespec.selfcheck import self_check

        target = open_target(self.bundle, runtime) if parent is None else parent._target.fork()
        self._target: DecoderSession = target
        self._draft: DraftSession | None = None
        self._inner: RecurrentSession | None = None
        self.row_rule: RowInvariance | None = target.row_rule
        if parent is None:
            found = self_check(target, self.bundle.manifest, runtime.threads, exact=runtime.exact)
            self.row_rule = found.row_rule if runtime.exact else None
            if self.row_rule == "none":
                raise SessionError(
                    f"{self.bundle.path}: exact mode cannot be had with this graph on this machine: "
                    "its logits depend on how many rows share a call. Load it without exact mode; near_tie=0.5 "
                    "(--near-tie) then decides close calls as plain decoding does"
                )
            target.row_rule = self.row_rule
        if "model" in self.drafters and self.bundle.manifest.draft is not None:
            loaded = None if parent is None else parent._draft
            self._draft = open_draft(self.bundle, runtime, target) if loaded is None else fork_draft(loaded, target)
        if spec.num_draft_tokens is None:  # a draft of fixed length is made token by token
            opened = None if parent is None else parent._inner
            self._inner = open_inner_draft(self.bundle, runtime, self._draft, opened)
        models = Models(self.bundle.manifest, runtime, target, self._draft, self._inner)
        drafters, policy = make_drafting(self.drafters, self._extra_drafters, spec, models)
        self._decoder = SpeculativeDecoder(
            target,
            drafters,
            policy=policy,
            eos_token_ids=self.bundle.manifest.eos_token_ids,
            prefill_chunk=runtime.prefill_chunk,
            verifier=spec.verifier,
            near_tie=0.0 if self.row_rule else runtime.near_tie,
        )

    @property
    def drafter(self) -> str:
        """Names of the drafters in use, as people write them: `ngram+model`, or `none`."""
        return "+".join(self.drafters) or "none"

    @property
    def providers(self) -> tuple[str, ...]:
        """ONNX Runtime's name of the provider of each session, target first."""
        return tuple(s.provider for s in self._sessions)

    @property
    def runtime(self) -> RuntimeParams:
        """How ONNX Runtime runs the models, with nothing left to choose but a `threads` of `None`."""
        return self._runtime

    @property
    def policy(self) -> DraftPolicy:
        """Who decides how much is drafted. May be replaced between answers, by one that looks on for instance."""
        return self._decoder.policy

    @policy.setter
    def policy(self, policy: DraftPolicy) -> None:
        self._decoder.policy = policy

    @property
    def context_length(self) -> int:
        """Most tokens that a prompt and its answer may have together."""
        return self._decoder.target.context_length

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, request: RequestParams | None = None
    ) -> TextStream:
        """Answer a conversation.

        What the caches already hold of it is not read again, so passing the whole conversation each turn is cheap.

        Args:
            messages: `{"role": "system" | "user" | "assistant", "content": text}`, oldest first.
            params: how the answer is sampled; greedy by default.
            request: what happens where the engine is busy or the conversation too long.
        Raises:
            ConfigError: the messages do not fit the template, or the bundle has none, or the grammar is not valid.
            ContextOverflowError: the conversation is too long and `request` does not allow to shorten it.
            MissingExtraError: a grammar is asked for and llguidance is not installed.
        """
        return self.open_stream(partial(self.prompts.from_messages, messages), params, request)

    def achat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, request: RequestParams | None = None
    ) -> AsyncTextStream:
        """`chat` for an event loop. Raises nothing itself; the first piece does."""
        return self._open_async(partial(self.prompts.from_messages, messages), params, request)

    def generate(
        self,
        prompt: str | Sequence[int] | Tokens,
        params: SamplingParams | None = None,
        request: RequestParams | None = None,
    ) -> TextStream:
        """Continue a text, or token ids of shape (n,), as they are: no template.

        Raises:
            ConfigError: the prompt is empty, an id is not in the vocabulary, the grammar is not valid, or turns
                are to be dropped from a text that has none.
            ContextOverflowError: the prompt is too long.
            MissingExtraError: a grammar is asked for and llguidance is not installed.
        """
        return self.open_stream(partial(self.prompts.from_text, prompt), params, request)

    def agenerate(
        self,
        prompt: str | Sequence[int] | Tokens,
        params: SamplingParams | None = None,
        request: RequestParams | None = None,
    ) -> AsyncTextStream:
        """`generate` for an event loop. Raises nothing itself; the first piece does."""
        return self._open_async(partial(self.prompts.from_text, prompt), params, request)

    def count_tokens(self, text: str | Sequence[Message]) -> int:
        """Tokens that a text, or a conversation as `chat` would send it, takes of the context.

        Raises:
            ConfigError: as `chat`.
        """
        return self.prompts.count(text)

    def fork(self, spec: SpecParams | None = None) -> Engine:
        """Another engine on the same loaded weights, with caches of its own: both may make answers at once.

        Costs the memory of the caches, and of a draft model that this engine has not loaded. Either may be closed
        first.

        Args:
            spec: another way of drafting; by default that of this engine.
        Raises:
            ConfigError: the engine is closed, or the bundle has no draft model that `spec` asks for.
        """
        self.gate.check_open()
        return Engine(self.bundle, spec or self._spec, self._runtime, self._extra_drafters, parent=self)

    def cancel(self) -> None:
        """End the answer that is being made, if one is, and wait until the engine is free. From any thread."""
        self.gate.eject()

    def save_caches(self, path: str | os.PathLike[str]) -> None:
        """Write what the models have read to a file (uncompressed .npz), which `load_caches` reads.

        The file appears whole or not at all. It takes the caches' size: 8 * layers * key/value heads * head size
        bytes a token for each model with a cache of its own.

        Raises:
            BusyError: an answer is being made.
            OSError: it cannot be written.
        """
        self.gate.enter()
        try:
            write_caches(Path(path), self._cache_file(), self._named_sessions())
        finally:
            self.gate.leave()

    def load_caches(self, path: str | os.PathLike[str]) -> None:
        """Replace the caches by those of a file. What is then asked need not be read again as far as it is the same.

        Raises:
            ConfigError: the file is damaged, or was made with another bundle or way of running it. The caches are as
                before.
            BusyError: an answer is being made.
            OSError: it cannot be read.
        """
        self.gate.enter()
        try:
            read_caches(Path(path), self._cache_file(), self._named_sessions())
        finally:
            self.gate.leave()

    def close(self, *, cancel: bool = False) -> None:
        """Release the sessions and caches. Closing twice is fine; using the engine afterwards is an error.

        Args:
            cancel: end the answer that is being made and refuse those that wait, as leaving a `with` block does.
        Raises:
            BusyError: an answer is being made, and `cancel` is not set.
        """
        if self.gate.close(eject=cancel):
            for session in reversed(self._sessions):
                session.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(cancel=True)

    def new_interrupt(self) -> Interrupt:
        """For `TextStream`: the flag that ends its calls."""
        from edgespec.ort import Interrupt

        return Interrupt()

    def steps(
        self,
        prompt: Prompt,
        params: SamplingParams,
        stats: GenerationStats,
        poll: Callable[[], bool],
        interrupt: Interrupt,
    ) -> Generator[Step, None, None]:
        """For `TextStream`, inside the gate: the rounds of an answer."""
        for session in self._sessions:
            session.interrupt = interrupt
        try:
            yield from self._decoder.generate(prompt.tokens, params, stats, poll, constraint=prompt.constraint)
        finally:
            for session in self._sessions:
                session.interrupt = None

    def open_stream(
        self,
        make: MakePrompt,
        params: SamplingParams | None,
        request: RequestParams | None,
        on_end: Callable[[Answer], None] | None = None,
        *,
        is_lazy: bool = False,
    ) -> TextStream:
        """For `Conversation`: a stream whose prompt is made here, or (`is_lazy`) by the thread that iterates."""
        params, request = params or SamplingParams(), request or RequestParams()
        if is_lazy:
            return TextStream(Answer(self, partial(make, params, request), params, request, on_end))
        self.gate.check_open()
        prompt = make(params, request)
        return TextStream(Answer(self, lambda: prompt, params, request, on_end))

    def _open_async(
        self, make: MakePrompt, params: SamplingParams | None, request: RequestParams | None
    ) -> AsyncTextStream:
        return AsyncTextStream(self.open_stream(make, params, request, is_lazy=True))

    @property
    def _sessions(self) -> tuple[DraftSession, ...]:
        return tuple(s for s in (self._target, self._draft, self._inner) if s is not None)

    def _named_sessions(self) -> dict[str, DecoderSession]:
        """The sessions with a cache of their own."""
        named = {"target": self._target}
        if self._draft is not None and self._draft.owns_cache:
            assert isinstance(self._draft, type(self._target))
            named["draft"] = self._draft
        return named

    def _cache_file(self) -> CacheFile:
        providers = "+".join(dict.fromkeys(self.providers))
        return CacheFile(bundle_digest(self.bundle.manifest), providers, self.row_rule or "off")
