"""edgespec: lossless speculative decoding for local language models on ONNX Runtime.

import edgespec

with edgespec.load("my-bundle") as engine:
    for piece in engine.chat([{"role": "user", "content": "Hello!"}]):
        print(piece, end="", flush=True)
"""

from edgespec.bundle import Bundle, Manifest, ModelInfo
from edgespec.engine import Engine, TextStream, load
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
from edgespec.params import RuntimeParams, SamplingParams, SpecParams
from edgespec.stats import GenerationStats

__version__ = "0.1.0"

__all__ = [
    "Bundle",
    "BundleError",
    "BusyError",
    "ConfigError",
    "ContextOverflowError",
    "EdgespecError",
    "Engine",
    "ExportError",
    "GenerationStats",
    "IncompatibleDraftError",
    "Manifest",
    "MissingExtraError",
    "ModelInfo",
    "RuntimeParams",
    "SamplingParams",
    "SessionError",
    "SpecParams",
    "TextStream",
    "load",
]
