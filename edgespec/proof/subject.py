"""`Subject`: what is tested. A bundle's models, opened for it, and prompts in which something repeats."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgespec.bundle import check_vocab, read_bundle
from edgespec.contracts import Scorer, Tokens
from edgespec.errors import ConfigError
from edgespec.grammar import GrammarCompiler
from edgespec.invariance import measure_row_invariance
from edgespec.models import open_draft, open_inner_draft, open_target
from edgespec.params import Grammar, RowInvariance, RuntimeParams
from edgespec.shaper import Constraint
from edgespec.speculation import resolve_runtime
from edgespec.tokens import Tokenizer

# Prompt lookup finds what followed the last time, and a model is not sure that it follows again.
PROMPTS = (
    "Tom has two dogs and a cat. Ann has two cats and a dog. Tom has two",
    "She said yes. He said no. She said yes. He said",
    "one two three four one two three five one two",
    "We went to the sea and to the hills. They went to the sea and to the",
    "Monday: rain and wind. Tuesday: sun and clouds. Wednesday: rain and",
)


class Stages(NamedTuple):
    """What drafts: a draft model, and one that drafts for it."""

    draft: Scorer | None
    inner: Scorer | None


@dataclass(frozen=True, slots=True)
class Subject:
    """A pair of models and texts to try it on.

    Attributes:
        name: of the bundle, for the report.
        target: the model whose distribution the output must have.
        draft: the draft model, if there is one.
        inner: drafts for the draft model, where there is something that does.
        prompts: token ids, each of shape (n,).
        row_rule: the rule under which the target's rows do not depend on the call, in force while it is tested.
        set_row_rule: puts a rule, or none, in force.
        make_constraint: a grammar, made ready for the tokenizer.
        max_ngram: longest suffix of prompt lookup.
        eos_token_ids: tokens that end an answer.
    """

    name: str
    target: Scorer
    draft: Scorer | None
    prompts: tuple[Tokens, ...]
    row_rule: RowInvariance = ">=2"
    set_row_rule: Callable[[RowInvariance | None], None] = lambda rule: None
    make_constraint: Callable[[Grammar], Constraint] | None = None
    max_ngram: int = 4
    eos_token_ids: tuple[int, ...] = ()
    inner: Scorer | None = None

    @property
    def stages(self) -> Stages:
        return Stages(self.draft, self.inner)


@contextlib.contextmanager
def open_subject(path: Path, runtime: RuntimeParams, *, with_draft: bool) -> Iterator[Subject]:
    """Open a bundle's models, find out the target's row rule, and close them at the end of the block.

    Args:
        path: folder of the bundle.
        runtime: `exact` plays no part: the rule is in force wherever there is one.
        with_draft: open the draft model, too, where the bundle has one.
    Raises:
        BundleError, SessionError, MissingExtraError: as `edgespec.load`.
        ConfigError: the context is too short for the prompts.
    """
    bundle = read_bundle(path, verify_hashes=runtime.verify_hashes)
    manifest = bundle.manifest
    runtime = resolve_runtime(runtime, manifest, has_draft=with_draft and manifest.draft is not None)
    tokenizer = Tokenizer(bundle.path / manifest.tokenizer)
    check_vocab(manifest, tokenizer.vocab_size)

    with contextlib.ExitStack() as stack:
        target = open_target(bundle, runtime)
        stack.callback(target.close)
        draft, inner = None, None
        if with_draft and manifest.draft is not None:
            draft = open_draft(bundle, runtime, target, reads=True)
            stack.callback(draft.close)
            inner = open_inner_draft(bundle, runtime, draft, reads=True)
            if inner is not None:
                stack.callback(inner.close)
        rule = measure_row_invariance(target)

        def set_row_rule(wanted: RowInvariance | None) -> None:
            target.row_rule = None if wanted == "none" else wanted

        set_row_rule(rule)
        prompts = tuple(np.asarray(tokenizer.encode(text, add_special_tokens=True)) for text in PROMPTS)
        longest = max(map(len, prompts))
        if target.context_length < longest + 66:
            raise ConfigError(f"{path}: a context of {target.context_length} tokens is too short for this test")
        yield Subject(
            name=manifest.name,
            target=target,
            draft=draft,
            inner=inner,
            prompts=prompts,
            row_rule=rule,
            set_row_rule=set_row_rule,
            make_constraint=GrammarCompiler(bundle.path / manifest.tokenizer, manifest.eos_token_ids).compile,
            eos_token_ids=tuple(manifest.eos_token_ids),
        )
