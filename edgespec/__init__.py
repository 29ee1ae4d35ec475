"""edgespec: lossless speculative decoding for local language models on ONNX Runtime.

import edgespec

with edgespec.load("my-bundle") as engine:
    for piece in engine.chat([{"role": "user", "content": "Hello!"}]):
        print(piece, end="", flush=True)
"""

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
