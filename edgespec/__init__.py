"""edgespec: lossless speculative decoding for local language models on ONNX Runtime.

import edgespec

with edgespec.load("my-bundle") as engine:
    for piece in engine.chat([{"role": "user", "content": "Hello!"}]):
        print(piece, end="", flush=True)
"""

TYPE_CHECKING = False  # as checkers take it; importing it takes longer than all the rest here
if TYPE_CHECKING:
    from edgespec.aio import AsyncTextStream
    from edgespec.answer import TextPiece
    from edgespec.bundle import Bundle, Manifest, ModelInfo
    from edgespec.conversation import Conversation
    from edgespec.engine import Engine, load
    from edgespec.errors import (
        BundleError,
        BusyError,
        ConfigError,
        ContextOverflowError,
        EdgespecError,
        ExportError,
        IncompatibleDraftError,
        MissingExtraError,
        SessionError,
    )
    from edgespec.logprobs import TokenLogprobs
    from edgespec.params import Grammar, RequestParams, RuntimeParams, SamplingParams, SpecParams
    from edgespec.stats import GenerationStats
    from edgespec.stream import TextStream

__version__ = "0.1.0"

__all__ = [
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

# Where a name is. It is imported when it is first asked for: importing the package alone takes no time, and Ctrl-C in
# what the rest takes meets a program that is ready for it.
_MODULES = {
    "aio": ("AsyncTextStream",),
    "answer": ("TextPiece",),
    "bundle": ("Bundle", "Manifest", "ModelInfo"),
    "conversation": ("Conversation",),
    "engine": ("Engine", "load"),
    "errors": tuple(name for name in __all__ if name.endswith("Error")),
    "logprobs": ("TokenLogprobs",),
    "params": ("Grammar", "RequestParams", "RuntimeParams", "SamplingParams", "SpecParams"),
    "stats": ("GenerationStats",),
    "stream": ("TextStream",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'edgespec' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"edgespec.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
