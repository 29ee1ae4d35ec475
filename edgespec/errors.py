"""The exceptions that edgespec raises. Owns nothing else.

::

    EdgespecError                  everything below; `except EdgespecError` is enough for an application
    ├── ConfigError                a parameter or an option has a value that cannot work
    ├── BundleError                a bundle is missing, damaged, foreign or of another format version
    ├── IncompatibleDraftError     the draft does not share the target's token map
    ├── ContextOverflowError       the prompt and the answer do not fit the model's context
    ├── SessionError               ONNX Runtime could not load or run a graph on the provider asked for
    ├── ExportError                a source could not be fetched, converted, checked or written
    ├── MissingExtraError          an optional dependency is not installed (or two exclude each other)
    └── BusyError                  the engine is already generating

A message is one line: what is wrong, where, and what to do about it.
"""

from __future__ import annotations


class EdgespecError(Exception):
    """Base class of every error that edgespec raises on purpose."""


class ConfigError(EdgespecError, ValueError):
    """A parameter or an option has a value that cannot work."""


class BundleError(EdgespecError):
    """A bundle is missing, damaged, foreign or of another format version."""


class IncompatibleDraftError(EdgespecError):
    """The draft does not share the target's token map, so its proposals would mean other text."""


class ContextOverflowError(EdgespecError):
    """The prompt and the answer do not fit the model's context."""


class SessionError(EdgespecError):
    """ONNX Runtime could not load or run a graph on the provider asked for."""


class ExportError(EdgespecError):
    """A source could not be fetched, converted, checked or written."""


class MissingExtraError(EdgespecError, ImportError):
    """An optional dependency is not installed, or two that exclude each other both are."""


class BusyError(EdgespecError):
    """The engine is already generating for somebody else."""
