"""Figures of the files in results/ that `edgespec bench` wrote, a picture beside each. Needs `edgespec[plot]`.

python benchmarks/plots.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import document, first_line

from edgespec.bench.journal import read_journal
from edgespec.cli.bench_figures import draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--format", choices=["png", "svg", "pdf"], default="svg")
    options = parser.parse_args()
    for path in sorted(options.results.glob("*.jsonl")):
        if "kind" in first_line(path):
            picture = path.with_suffix(f".{options.format}")
            draw(document(read_journal(path)), picture)
            print(picture)


if __name__ == "__main__":
    main()
