"""`edgespec bench`: drafting against plain decoding, and against other engines. Owns the options and the document."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import click

from edgespec.bench import Bench, Plan, Trial, read_prompts, summarise
from edgespec.bench.journal import Journal
from edgespec.bench.machine import machine
from edgespec.bench.memory import peak_bytes
from edgespec.bench.peers import PEERS, Peer, PeerError, PeerName
from edgespec.bench.settings import OPPONENTS, default_opponent
from edgespec.bundle import Bundle, cache_dir, default_bundle_path, read_bundle
from edgespec.cli import tables, terminal
from edgespec.cli.bench_figures import draw
from edgespec.cli.bench_report import write_report
from edgespec.cli.help import HELP
from edgespec.cli.options import NamedPath, option, params_of
from edgespec.cli.progress import progress
from edgespec.cli.run import ensure_default_bundle
from edgespec.errors import ConfigError
from edgespec.params import RuntimeParams, SamplingParams, Spinning
from edgespec.state import bundle_digest

_PLAN, _RUNTIME = Plan(), RuntimeParams()


class _Names(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases of click only
    """Some of a list of names, with commas between them."""

    name = "NAME,..."

    def __init__(self, choices: Sequence[str] = ()) -> None:
        self.choices = choices

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in str(value).split(",") if name.strip()))
        for name in names:
            if self.choices and name not in self.choices:
                self.fail(f"{name!r} is not one of {', '.join(self.choices)}", param, ctx)
        return names


def _models(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Path]:
    """`ENGINE=PATH`, several times."""
    found: dict[str, Path] = {}
    for value in values:
        name, _, path = value.partition("=")
        if name not in PEERS or not path:
            raise click.BadParameter(f"{value!r} is not ENGINE=PATH with one of {', '.join(PEERS)}")
        found[name] = Path(path)
    return found


@click.command("bench", context_settings=HELP)
@click.argument("bundle", required=False, type=NamedPath())
@option("--prompts", text="Folder of FAMILY.jsonl files.  [default: a few that come along]", type=NamedPath())
@option("--families", text="Only these.", type=_Names())
@option("--limit", text="Prompts of each family.", default=8, type=click.IntRange(1))
@option("--repetitions", text="Passes over all prompts.", default=_PLAN.repetitions, type=click.IntRange(1))
@option("--max-new-tokens", text="Longest answer.", default=_PLAN.params.max_new_tokens, type=click.IntRange(2))
@option("--against", text=f"Opponents: {','.join(OPPONENTS)}.", type=_Names(OPPONENTS), default="none")
@option("--search", text="Run every fixed drafter and length, too.", is_flag=True)
@option("--temperature", text="0 is greedy.", default=0.0, type=float)
@option("--top-p", text="Keep the most probable tokens up to this mass.", default=1.0, type=float)
@option("--seed", text="Of the first pass; each further one adds one.", default=_PLAN.params.seed, type=int)
@option("--exact", text="Greedy text bit-identical to that of plain decoding.", is_flag=True)
@option("--threads", text="Threads per operator.  [default: what tune found, else one per core]", type=int)
@option("--spinning", text="Whether idle threads spin.", default="auto", type=click.Choice(get_args(Spinning)))
@option("--provider", text="Execution provider: cpu, cuda, ...", default=_RUNTIME.provider)
@option("--draft-provider", text="Execution provider of the draft model.  [default: that of --provider]")
@option("--peers", text=f"Other engines: {','.join(PEERS)}.", type=_Names(PEERS))
@option("--peer-python", text="Python that has them installed.  [default: this one]", metavar="PATH")
@option("--peer-model", text="Model of a peer.", multiple=True, callback=_models, metavar="ENGINE=PATH")
@option("--peer-draft", text="Draft model of a peer.", multiple=True, callback=_models, metavar="ENGINE=PATH")
@option("--output", "-o", text="Trials, a JSON object a line.  [default: in the cache]", type=NamedPath())
@option("--plot", text="Draw the figures to this file.", type=NamedPath(dir_okay=False))
@option("--json", "as_json", text="Print one JSON document.", is_flag=True)
def bench_command(bundle: Path | None, as_json: bool, plot: Path | None, **options: Any) -> None:
    """Measure what drafting gains on this machine.

    The default drafter runs against plain decoding, and against what --against names, taking turns on each prompt.
    Families are compared by decoding speed; every trial is kept, with whether its text was the plain one.
    """
    if plot is not None:
        tables.require_matplotlib()
    if bundle is None:
        ensure_default_bundle()
    found = read_bundle(bundle or default_bundle_path())
    document = _run(found, options)
    if plot is not None:
        draw(document, plot)
    if as_json:
        terminal.write_json(document)
    else:
        write_report(document)


def _run(bundle: Bundle, options: dict[str, Any]) -> dict[str, Any]:
    prompts = read_prompts(options["prompts"], options["families"] or (), options["limit"])
    plan = _plan(options)
    facts = _facts(bundle, plan)
    trials: list[Trial] = []
    with contextlib.ExitStack() as stack:
        peers, left_out = _open_peers(options, stack)
        tell = stack.enter_context(progress())
        tell("loading", 0.0)
        bench = stack.enter_context(Bench(bundle, prompts, plan, peers))
        path = options["output"] or _default_output(bundle)
        others = {f"{peer.name} {mode}": {"engine_version": peer.version} for peer in peers for mode in peer.modes}
        journal = stack.enter_context(Journal(path, facts, bench.described | others))
        for trial in bench.trials(tell):
            trials.append(trial)
            journal.trial(trial)
        ties = list(bench.near_ties.values())
        journal.near_ties(ties)
        tell("measuring memory", 1.0)
        left_out += bench.failures.values()
        memory = _memory(bundle, bench, plan) | {peer.name: _peer_peak(peer) for peer in peers}
        journal.memory(memory)
        if bench.costs is not None:
            journal.costs(bench.costs)
    default = default_opponent(has_model=bundle.manifest.draft is not None)
    return {
        **facts,
        "repetitions": plan.repetitions,
        "settings": bench.described,
        "peers": {peer.name: {"version": peer.version, "modes": peer.modes} for peer in peers},
        "left_out": left_out + [f"{p.family} {p.id}: too long for the context" for p in bench.skipped],
        **summarise(trials, default),
        "near_ties": [asdict(tie) for tie in ties],
        "peak_bytes": memory,
        "costs": bench.costs,
        "trials_file": str(path),
        "trials": [trial.as_dict() for trial in trials],
    }


def _plan(options: dict[str, Any]) -> Plan:
    against = options["against"]
    if not against:
        raise click.UsageError(f"--against is empty; name some of {','.join(OPPONENTS)}")
    params: SamplingParams = params_of(SamplingParams, options)
    runtime: RuntimeParams = params_of(RuntimeParams, options)
    return Plan(against, options["repetitions"], params, runtime, search=options["search"])


def _facts(bundle: Bundle, plan: Plan) -> dict[str, Any]:
    sampling = {"temperature": plan.params.temperature, "top_p": plan.params.top_p, "exact": plan.runtime.exact}
    manifest = bundle.manifest
    about: dict[str, str | None] = {
        "name": manifest.name,
        "folder": bundle.path.resolve().name,
        "digest": bundle_digest(manifest),
    }
    about |= {"target": manifest.target.precision, "draft": manifest.draft.precision if manifest.draft else None}
    date = time.strftime("%Y-%m-%dT%H:%M:%S")
    return {"bundle": about, "max_new_tokens": plan.params.max_new_tokens, **sampling, "date": date} | {
        "machine": machine()
    }


def _default_output(bundle: Bundle) -> Path:
    return cache_dir() / "bench" / f"{bundle.path.resolve().name}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"


def _open_peers(options: dict[str, Any], stack: contextlib.ExitStack) -> tuple[list[Peer], list[str]]:
    """The engines that can be run, and a line for each one that cannot."""
    peers, left_out = [], []
    models, drafts, wanted = options["peer_model"], options["peer_draft"], options["peers"] or ()
    for name in [*models, *drafts]:
        if name not in wanted:
            raise ConfigError(f"a model is given for {name}, which is not in --peers: add it there")
    for name in wanted:
        try:
            peers.append(stack.enter_context(_open_peer(name, options, models, drafts)))
        except PeerError as error:
            left_out.append(str(error))
            terminal.note(f"left out: {error}")
    return peers, left_out


def _open_peer(name: PeerName, options: dict[str, Any], models: dict[str, Path], drafts: dict[str, Path]) -> Peer:
    if name not in models:
        raise PeerError(f"{name}: name its model with --peer-model {name}=PATH")
    python = options["peer_python"] or sys.executable
    return Peer(name, python, models[name], drafts.get(name), options["threads"])


def _peer_peak(peer: Peer) -> int | None:
    try:
        return peer.peak_bytes()
    except PeerError:  # it ended before its time, which is in the report
        return None


def _memory(bundle: Bundle, bench: Bench, plan: Plan) -> dict[str, int | None]:
    """Of each setting in a process of its own, the fixed lengths left out."""
    chosen = [s for s in bench.settings if not s.is_fixed]
    count = plan.params.max_new_tokens
    return {s.name: peak_bytes(bundle.path, s.spec, bench.runtimes[s.name], bench.longest, count) for s in chosen}
