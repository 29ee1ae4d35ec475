"""`edgespec verify`: test that drafts change nothing. Owns the options, the tables and the figure."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource

from edgespec.bundle import default_bundle_path, read_bundle
from edgespec.cli import tables, terminal
from edgespec.cli.help import HELP
from edgespec.cli.options import NamedPath, option, sampling_options, sampling_params
from edgespec.cli.progress import progress, seconds
from edgespec.cli.run import ensure_default_bundle
from edgespec.cli.verify_report import draw, write_report
from edgespec.errors import ConfigError
from edgespec.params import RuntimeParams, SpecParams, Spinning, Verifier
from edgespec.proof import Proof, Setting, open_subject
from edgespec.proof.procedure import GREEDY, SAMPLED, STRUCTURED

_UNUSED = ("max_new_tokens", "stop")


@click.command("verify", context_settings=HELP)
@click.argument("bundle", required=False, type=NamedPath())
@option("--drafter", text="Whose drafts.", default="all", type=click.Choice(["all", "model", "ngram"]))
@option("--verifier", text="Which rule.", default=SpecParams().verifier, type=click.Choice(get_args(Verifier)))
@option("--num-draft-tokens", text="Drafted per round.", default=2, type=click.IntRange(1, 64))
@option("--budget", text="Time to take, as in 60s or 5m.", default="60s", callback=seconds)
@option("--threads", text="Threads per operator.  [default: one per physical core]", type=int)
@option("--provider", text="Execution provider: cpu, cuda, ...", default=RuntimeParams().provider)
@option("--draft-provider", text="Execution provider of the draft model.  [default: that of --provider]")
@sampling_options
@option("--plot", text="Draw p-values and counts to this file.", type=NamedPath(dir_okay=False))
@option("--json", "as_json", text="Print one JSON document.", is_flag=True)
def verify_command(
    bundle: Path | None,
    drafter: str,
    verifier: Verifier,
    num_draft_tokens: int,
    budget: float,
    seed: int | None,
    threads: int | None,
    provider: str,
    draft_provider: str | None,
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Test that a bundle's drafts change nothing.

    BUNDLE is a folder that `edgespec export` made; without it the default bundle is tested. Four things are looked
    at: that the rule's arithmetic gives back the target's distribution on this pair's own rows; that what the whole
    loop emits fits the exact distributions, over thousands of samples; that greedy text is the same with and
    without drafts; and how much a row of logits depends on which rows share the call.

    With sampling options, those settings are tested instead of the usual list. Exit code 1 means that a test failed.
    """
    if plot is not None:
        tables.require_matplotlib()
    settings = _settings(options)
    if bundle is None:
        ensure_default_bundle()
        bundle = default_bundle_path()
    names = _drafters(drafter, has_model=read_bundle(bundle, verify_hashes=False).manifest.draft is not None)
    spinning: Spinning = "off" if "model" in names else "stop"
    runtime = RuntimeParams(provider=provider, threads=threads, spinning=spinning, draft_provider=draft_provider)
    with progress() as tell:
        tell("loading", 0.0)
        with open_subject(bundle, runtime, with_draft="model" in names) as subject:
            report = Proof(
                subject,
                settings,
                drafters=names,
                num_draft_tokens=num_draft_tokens,
                verifier=verifier,
                budget=budget,
                seed=seed or 0,
                progress=tell,
            ).run()
    if plot is not None:
        draw(report, plot)
    if as_json:
        terminal.write_json(report.as_dict())
    else:
        write_report(report)
    return 0 if report.passed else 1


# What of the sampling options has no meaning here: texts are as long as the test needs.
verify_command.params = [p for p in verify_command.params if p.name not in _UNUSED]


def _settings(options: dict[str, Any]) -> list[Setting]:
    """Those that were asked for, with their greedy twin, or the usual ones."""
    source = click.get_current_context().get_parameter_source
    given = {name: value for name, value in options.items() if source(name) is ParameterSource.COMMANDLINE}
    if given:
        params = sampling_params(options)
        name = ", ".join(f"{key.replace('_', '-')} {_short(value)}" for key, value in given.items())
        if params.is_greedy:
            return [Setting(name, params)]
        return [Setting("the same, greedy", replace(params, temperature=0.0)), Setting(name, params)]
    if importlib.util.find_spec("llguidance") is None:
        terminal.note("JSON schema is not tested: llguidance is not installed (`pip install 'edgespec[structured]'`)")
        return [GREEDY, *SAMPLED]
    return [GREEDY, *SAMPLED, STRUCTURED]


def _short(value: object) -> str:
    return value.name if isinstance(value, Path) else str(value)


def _drafters(wanted: str, *, has_model: bool) -> list[str]:
    if wanted == "model" and not has_model:
        raise ConfigError("the bundle has no draft model: test --drafter ngram, or export it with --draft")
    if wanted != "all":
        return [wanted]
    return ["ngram", "model"] if has_model else ["ngram"]
