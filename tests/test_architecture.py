"""The shape of the project: layers, import cost, public names, file lengths."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import edgespec

ROOT = Path(edgespec.__file__).parent
REPOSITORY = Path(__file__).parent.parent

# A file imports only from the sets above it, and from its own set only what is named before it.
LAYERS = [
    [
        "errors",
        "memory",
        "params",
        "noise",
        "logprobs",
        "sampling",
        "processors",
        "shaper",
        "head",
        "stats",
        "verify",
        "theory",
        "costs",
        "acceptance",
        "policy",
    ],
    ["contracts", "lookup", "rounds"],
    [
        "fields",
        "bundle",
        "kv",
        "hidden",
        "ort",
        "session",
        "recurrent",
        "invariance",
        "probe",
        "tokens",
        "grammar",
        "chat",
        "state",
        "profile",
        "selfcheck",
        "prepacked",
        "models",
    ],
    [
        "drafters.ngram",
        "drafters.history",
        "drafters.model",
        "drafters.staged",
        "drafters",
        "decoder",
        "speculation",
        "tuning",
        "gate",
        "prompts",
        "answer",
        "stream",
        "aio",
        "engine",
        "conversation",
        "testing",
        "proof",
        "bench",
    ],
    ["export", "distill", "cli"],
]
ORDER = [name for layer in LAYERS for name in layer]
HEAVY = {"torch", "transformers", "optimum", "onnx", "onnx_ir", "gguf", "safetensors", "huggingface_hub"}
# Third-party modules by who may import them.
OWNERS = {
    "onnxruntime": ("ort", "export"),
    "tokenizers": ("tokens", "export", "distill"),
    "jinja2": ("chat",),
    "llguidance": ("grammar",),
    "click": ("cli",),
    "rich": ("cli",),
    "markdown_it": ("cli",),
    "prompt_toolkit": ("cli",),
    "matplotlib": ("cli",),
    "platformdirs": ("bundle",),
    **dict.fromkeys(HEAVY, ("export",)),
    **dict.fromkeys(("torch", "transformers", "safetensors"), ("export", "distill")),
}
# Scripts that run in another Python, one that has what they import.
ELSEWHERE = {"bench.peer_worker"}
# Two exceptions to the order within the engine layer, which the table in DESIGN.md forbids the drafters.
FORBIDDEN = {
    "drafters": {"session", "decoder", "engine"},
    "decoder": {"session", "tokens", "engine"},
    "export": {"decoder"},
}


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found.append((".".join(p for p in parts if p != "__init__"), path))
    return found


def unit(module: str) -> str:
    """The entry of `LAYERS` that a module belongs to."""
    parts = module.split(".")
    return next((n for n in (".".join(parts[:i]) for i in range(len(parts), 0, -1)) if n in ORDER), module)


def imports(path: Path) -> set[str]:
    """Dotted names of everything that a file imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(str(node.module))
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize(
    ("module", "path"), [m for m in modules() if m[0] not in ("", "__main__")], ids=lambda v: str(v)
)
def test_layers(module: str, path: Path) -> None:
    """A file imports only what the table in the design allows."""
    own = unit(module)
    assert own in ORDER, f"{module} has no layer: add it to the table"
    for name in imports(path):
        head, _, rest = name.partition(".")
        if head == "edgespec":
            other = unit(rest)
            if other in ORDER and other != own:
                assert ORDER.index(other) < ORDER.index(own), f"{module} imports {name}"
                assert other not in FORBIDDEN.get(own.split(".")[0], ()), f"{module} imports {name}"
        elif head in OWNERS and module not in ELSEWHERE:
            assert own.split(".")[0] in OWNERS[head], f"{module} imports {name}"


def test_pure_modules_need_only_numpy() -> None:
    """The first layer is the standard library and NumPy; parameters and errors not even that."""
    for name in LAYERS[0]:
        heads = {i.split(".")[0] for i in imports(ROOT / f"{name}.py")} - {"edgespec"}
        assert heads - {"numpy"} <= set(sys.stdlib_module_names), name
        assert name not in ("errors", "params") or "numpy" not in heads


def test_importing_is_cheap() -> None:
    """A fresh process that imports edgespec has loaded none of the heavy packages."""
    code = "import sys, edgespec; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert "edgespec" in loaded
    assert not loaded & (HEAVY | {"click", "rich", "prompt_toolkit", "onnxruntime", "llguidance", "asyncio"})


def test_public_names() -> None:
    """What applications may rely on."""
    assert sorted(edgespec.__all__) == [
        "AsyncTextStream",
        "Bundle",
        "BundleError",
        "BusyError",
        "ConfigError",
        "ContextOverflowError",
        "Conversation",
        "EdgespecError",
        "Engine",
        "ExportError",
        "GenerationStats",
        "Grammar",
        "IncompatibleDraftError",
        "Manifest",
        "MissingExtraError",
        "ModelInfo",
        "RequestParams",
        "RuntimeParams",
        "SamplingParams",
        "SessionError",
        "SpecParams",
        "TextPiece",
        "TextStream",
        "TokenLogprobs",
        "load",
    ]
    assert all(getattr(edgespec, name).__doc__ for name in edgespec.__all__)


def test_scripts_import_what_there_is() -> None:
    """Benchmarks and examples, which few tests run, name only what the package has."""
    for folder in ("benchmarks", "examples"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "edgespec":
                    module = importlib.import_module(str(node.module))
                    for name in (alias.name for alias in node.names):
                        is_there = hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}")
                        assert is_there, f"{path}: {node.module} has no {name}"


def test_files_stay_short() -> None:
    """No file over 400 lines; the median function under 12."""
    lengths: list[int] = []
    for folder in ("edgespec", "tests", "benchmarks", "examples"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert text.count("\n") <= 400, f"{path} is too long"
            if folder == "edgespec":
                nodes = ast.walk(ast.parse(text))
                lengths += [n.end_lineno - n.lineno + 1 for n in nodes if isinstance(n, ast.FunctionDef)]
    assert sorted(lengths)[len(lengths) // 2] < 12
