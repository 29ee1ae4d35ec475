"""Markdown tables of the files in results/, and nothing that is not in them.

    python benchmarks/tables.py            # to the terminal
    python benchmarks/tables.py --update   # into benchmarks/README.md, between its two marks

Files that `edgespec bench` and `replay.py` wrote become a table each; what `equality.py` wrote becomes one table
together.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import document, first_line
from replay import by_family

from edgespec.bench.journal import Run, read_journal
from edgespec.bench.summary import is_fixed, is_peer

HERE = Path(__file__).parent
BEGIN, END = "<!-- tables begin: written by tables.py -->", "<!-- tables end -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--update", action="store_true", help="write them into README.md")
    options = parser.parse_args()
    text = "\n".join(all_tables(sorted(options.results.glob("*.jsonl"))))
    if not options.update:
        print(text)
        return
    readme = HERE / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8", newline="\n")


def all_tables(paths: list[Path]) -> list[str]:
    """Lines of Markdown."""
    lines: list[str] = []
    equality = []
    for path in paths:
        first = first_line(path)
        if "kind" in first:
            lines += run_tables(path.stem, read_journal(path))
        elif path.stem.startswith("equality-"):
            equality.append((path.stem.removeprefix("equality-"), first["machine"], rows_of(path)))
        elif path.stem.startswith("replay-"):
            lines += replay_table(path)
    return lines + equality_table(equality)


def run_tables(name: str, run: Run) -> list[str]:
    """All tables of one run."""
    found, facts = document(run), run.facts
    default, bundle = found["default"], facts["bundle"]
    draft = "" if bundle["draft"] is None else f", draft {bundle['draft']}"
    how = "greedy" if facts["temperature"] == 0 else f"temperature {facts['temperature']}, top-p {facts['top_p']}"
    threads = f"{facts['threads']} threads" if facts["threads"] else "default threads"
    threads += f", spinning {facts['spinning']}"
    exact, machine = ", exact" if facts["exact"] else "", facts["machine"]
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    lines = [f"### {name}", ""]
    lines += [
        f"Target {bundle['target']}{draft}; {how}{exact}; up to {facts['max_new_tokens']} tokens; {machine['cpu']}, "
        f"{threads}; {versions}; {facts['date'][:10]}.",
        "",
    ]
    lines += speed_table(found["rows"], default, run.memory)
    if found["geometric_mean"] is not None:
        lines += [f"Geometric mean of {default} over plain: {found['geometric_mean']:.2f}x.", ""]
    lines += search_table(found["search"]) + peer_table(found["over_peers"])
    if run.near_ties:
        most = max(tie["margin"] for tie in run.near_ties)
        lines += [
            f"{len(run.near_ties)} greedy texts part at near-ties, {most:.3f} apart at most in log-probability.",
            "",
        ]
    return lines


def speed_table(rows: list[dict[str, Any]], default: str, memory: dict[str, int | None]) -> list[str]:
    """A line for each family: speed-up over plain of all settings, and more of the default drafter."""
    settings = [s for s in dict.fromkeys(r["setting"] for r in rows) if not is_fixed(s) and not is_peer(s)][1:]
    more = ["over best plain", "accepted", "tokens/pass", "first token", "predicted / measured", "equal"]
    body = []
    for family in dict.fromkeys(row["family"] for row in rows):
        mine = {row["setting"]: row for row in rows if row["family"] == family}
        body.append([family, *(speed(mine.get(setting)) for setting in settings), *details(mine.get(default))])
    lines = table(["family", *settings, *more], body)
    peaks = ", ".join(f"{name} {peak / 2**20:.0f}" for name, peak in memory.items() if peak is not None)
    return [*lines, f"Peak memory, MB: {peaks}.", ""] if peaks else lines


def speed(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    speedup = row["speedup"]
    return f"{speedup['median']:.2f}x ({speedup['low']:.2f}-{speedup['high']:.2f})"


def details(row: dict[str, Any] | None) -> list[str]:
    if row is None:
        return ["-"] * 6
    acceptance, passes, predicted = row["acceptance"], row["tokens_per_pass"], row["predicted_over_measured"]
    return [
        f"{row['over_best_plain']['median']:.2f}x",
        "-" if acceptance is None else f"{acceptance:.0%}",
        "-" if passes is None else f"{passes:.2f}",
        f"{row['first_token_ratio']:.2f}x",
        "-" if predicted is None else f"{predicted:.2f}",
        f"{row['equal']} of {row['comparable']}" if row["comparable"] else "-",
    ]


def search_table(search: dict[str, dict[str, Any]]) -> list[str]:
    """The best fixed drafter and length of each family in hindsight, and the controller over it."""
    body = [
        [family, f["best_fixed"], f"{f['best_fixed_speedup']:.2f}x", f"{f['controller_over_best_fixed']:.3f}"]
        for family, f in search.items()
    ]
    return table(["family", "best fixed in hindsight", "its speed-up", "controller over it"], body) if body else []


def peer_table(over_peers: dict[str, dict[str, float]]) -> list[str]:
    """Tokens per second of the default drafter over those of other engines."""
    families = list(dict.fromkeys(family for line in over_peers.values() for family in line))
    body = [
        [setting, *(f"{line[family]:.2f}x" if family in line else "-" for family in families)]
        for setting, line in over_peers.items()
    ]
    return table(["tokens per second over", *families], body) if body else []


def replay_table(path: Path) -> list[str]:
    """The controller beside the best fixed drafter and length, on one text and one clock."""
    found = by_family(rows_of(path))
    lines = [f"### The controller against every fixed drafter and length: {path.stem.removeprefix('replay-')}", ""]
    return lines + table(list(found[0]), [list(line.values()) for line in found])


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The lines after the first, which has the machine."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]


def equality_table(files: list[tuple[str, dict[str, Any], list[dict[str, Any]]]]) -> list[str]:
    """How many speculative greedy texts are equal to the plain ones, and where the others part."""
    if not files:
        return []
    body = []
    for name, _, rows in files:
        margins = sorted(row["margin"] for row in rows if not row["equal"])
        apart = f"{margins[len(margins) // 2]:.3f}, at most {margins[-1]:.3f}" if margins else "-"
        drafted, accepted = (sum(row[key] for row in rows) for key in ("drafted", "accepted"))
        body.append([name, f"{sum(row['equal'] for row in rows)} of {len(rows)}", apart, f"{accepted / drafted:.0%}"])
    machine = files[0][1]
    lines = ["### Speculative greedy text against plain greedy text", ""]
    lines += table(["target, drafter", "equal", "logits apart where they part, median", "accepted"], body)
    return [*lines, f"{machine['cpu']}, {machine['cores']} cores.", ""]


def table(headers: list[str], body: list[list[str]]) -> list[str]:
    """A Markdown table and an empty line."""
    lines = [headers, ["---"] * len(headers), *body]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


if __name__ == "__main__":
    main()
