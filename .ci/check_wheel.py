"""Checks an installed wheel from outside the checkout: what it holds, and what `import edgespec` loads."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

HEAVY = ("torch", "transformers", "optimum", "onnx", "onnx_ir", "onnxruntime", "click", "rich", "prompt_toolkit")


def top_level(wheel: str) -> set[str]:
    """The names that installing the wheel adds to site-packages, its own metadata aside."""
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    return {name for name in names if not name.endswith(".dist-info")}


def main() -> None:
    import edgespec

    package = Path(edgespec.__file__).parent
    assert "site-packages" in package.parts, f"not the installed wheel: {package}"
    loaded = [name for name in HEAVY if name in sys.modules]
    assert not loaded, f"`import edgespec` loads {loaded}"
    assert top_level(sys.argv[1]) == {"edgespec"}, top_level(sys.argv[1])
    for name in ("py.typed", "_data/recipes/smollm2-135m.toml", "_data/models/README.md", "export/check_text.txt"):
        assert (package / name).is_file(), f"the wheel lacks {name}"
    done = subprocess.run(
        [sys.executable, "-m", "edgespec", "export", "smollm2-135m", "-o", "x"], capture_output=True, text=True
    )
    assert done.returncode == 1, done
    assert "pip install 'edgespec[cpu,export]'" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    sys.stdout.write("the wheel is right\n")


main()
