"""ONNX Runtime itself: importing it, its providers, tensors and sessions. The only file that imports onnxruntime.

Knows nothing of decoders, caches or tokens.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ConfigError, MissingExtraError, SessionError
from edgespec.params import RuntimeParams, Spinning

_SHORT_PROVIDER_NAMES = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "dml": "DmlExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "qnn": "QNNExecutionProvider",
}
# Where a provider's tensors can be bound; all others read and write the memory of the host.
_DEVICES = {"CUDAExecutionProvider": "cuda", "DmlExecutionProvider": "dml"}
_PACKAGES = ("onnxruntime", "onnxruntime-gpu")
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: for all contexts, ONNX Runtime's too
_NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"


def import_onnxruntime() -> ModuleType:
    """The onnxruntime module, provided by exactly one of its two packages.

    Raises:
        MissingExtraError: neither package is installed, or both are (they overwrite each other's files).
    """
    installed = [name for name in _PACKAGES if _is_installed(name)]
    if len(installed) == 2:
        raise MissingExtraError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files: "
            "run `pip uninstall onnxruntime onnxruntime-gpu`, then `pip install` the one you want"
        )
    try:
        with _without_telemetry():
            import onnxruntime
    except ImportError as error:
        raise MissingExtraError(
            "onnxruntime is not installed: run `pip install 'edgespec[cpu]'` or `pip install 'edgespec[gpu]'`"
        ) from error
    onnxruntime.disable_telemetry_events()
    return onnxruntime  # type: ignore[no-any-return]


@contextlib.contextmanager
def _without_telemetry() -> Iterator[None]:
    """While it is imported, ONNX Runtime decides whether to send telemetry and to mark the device in the user's home.

    `disable_telemetry_events` comes too late for that. A user who has set the variable decides for himself.
    """
    if _NO_TELEMETRY in os.environ:
        yield
        return
    os.environ[_NO_TELEMETRY] = "1"
    try:
        yield
    finally:
        os.environ.pop(_NO_TELEMETRY, None)


def _is_installed(distribution: str) -> bool:
    import importlib.metadata  # slow to import itself

    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def runtime_version() -> str:
    """Version of the installed onnxruntime."""
    return str(import_onnxruntime().__version__)


def available_providers() -> list[str]:
    """ONNX Runtime's names of the execution providers that the installed package was built with."""
    return list(import_onnxruntime().get_available_providers())


def provider_name(name: str) -> str:
    """ONNX Runtime's name of a provider.

    Raises:
        ConfigError: the installed onnxruntime package does not have it.
    """
    full = _SHORT_PROVIDER_NAMES.get(name.lower(), name)
    available = available_providers()
    if full not in available:
        raise ConfigError(
            f"provider {name!r} is not in the installed onnxruntime package, which has {', '.join(available)}"
        )
    return full


class OrtDevice:
    """Tensors in the memory of the provider that runs the graph.

    Args:
        provider: ONNX Runtime's name of it.
        pinned: page-lock what `host_array` gives, so that a CUDA device copies into it directly.
    """

    def __init__(self, provider: str, *, pinned: bool = False) -> None:
        self._ort = import_onnxruntime()
        self.name = _DEVICES.get(provider, "cpu")
        self._pins = pinned and self.name == "cuda"

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        if self.name == "cpu":
            return self.put(np.zeros(shape, dtype))
        return self._ort.OrtValue.ortvalue_from_shape_and_type(shape, np.dtype(dtype).type, self.name, 0)

    def put(self, array: NDArray[Any]) -> Any:
        """On the CPU the tensor *is* the array's memory."""
        return self._ort.OrtValue.ortvalue_from_numpy(array, self.name, 0)

    def host_array(self, shape: Sequence[int], dtype: str) -> NDArray[Any]:
        """An array in the host's memory for results, whose contents do not matter.

        Raises:
            SessionError: its memory cannot be pinned as asked for.
        """
        array = np.empty(shape, dtype)
        if self._pins and array.nbytes:
            _pin(array)
        return array


def _pin(array: NDArray[Any]) -> None:
    """Page-lock an array's memory for as long as it lives, by CUDA's driver.

    The driver is there wherever the provider runs, under one name, which the runtime library is not.
    """
    address, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        _call_driver(driver, "cuMemHostRegister_v2", address, size, _PORTABLE)
    except (OSError, AttributeError) as error:
        raise SessionError(f"memory cannot be pinned for CUDA ({error}): leave out `pinned_logits`") from error
    weakref.finalize(array, _unpin, driver, address).atexit = False


def _unpin(driver: Any, address: Any) -> None:
    with contextlib.suppress(OSError):  # nobody could do anything about it
        _call_driver(driver, "cuMemHostUnregister", address)


def _call_driver(driver: Any, name: str, *arguments: Any) -> None:
    """Call a function of CUDA's driver in the context that the first device's users share.

    Raises:
        OSError: it failed.
    """

    def call(name: str, *arguments: Any) -> None:
        status = getattr(driver, name)(*arguments)
        if status:
            raise OSError(f"{name} gave {status}")

    context = ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    try:
        call("cuCtxPushCurrent_v2", context)
        try:
            call(name, *arguments)
        finally:
            call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    finally:
        call("cuDevicePrimaryCtxRelease_v2", 0)


class Interrupt:
    """Ends the call of a model that is under way, and any later one of the same answer. From any thread.

    ONNX Runtime looks at it between two operators of the graph.
    """

    def __init__(self) -> None:
        from onnxruntime import RunOptions

        self.options: Any = RunOptions()

    def set(self) -> None:
        self.options.terminate = True

    def is_set(self) -> bool:
        return bool(self.options.terminate)


# Alive in this process, so that a forked child can be kept from releasing what it cannot.
_sessions: weakref.WeakSet[Any] = weakref.WeakSet()


def _keep_for_ever() -> None:
    """In a forked child: releasing a session joins its threads, which did not come along, and would never return."""
    for session in list(_sessions):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_for_ever)


def open_session(path: Path, runtime: RuntimeParams, *, save_to: Path | None = None) -> Any:
    """ONNX Runtime's session of a graph, on the provider asked for or none.

    Args:
        save_to: write the graph as it is computed to this file, and its weights, as kernels want them, beside it.
    Raises:
        SessionError: the graph or the provider cannot be used.
        ConfigError: the provider is not installed.
    """
    ort = import_onnxruntime()
    provider = provider_name(runtime.provider)
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what is wrong is raised
    if runtime.threads is not None:
        options.intra_op_num_threads = runtime.threads
    for key, value in _SPINNING[runtime.spinning].items():
        options.add_session_config_entry(key, value)
    if save_to is not None:
        options.optimized_model_filepath = str(save_to)
        for key, value in _saving(save_to).items():
            options.add_session_config_entry(key, value)
    try:
        session = ort.InferenceSession(str(path), options, providers=[provider])
    except Exception as error:
        raise SessionError(f"{path}: ONNX Runtime cannot load the graph: {one_line(error)}") from error
    session.disable_fallback()
    if session.get_providers()[0] != provider:
        raise SessionError(
            f"provider {runtime.provider!r} cannot be used on this machine (its libraries or its device are missing): "
            "install them, or choose `cpu`"
        )
    _sessions.add(session)
    return session


_SPINNING: dict[Spinning, dict[str, str]] = {
    "on": {},
    "off": {"session.intra_op.allow_spinning": "0"},
    "stop": {"session.force_spinning_stop": "1"},
    "auto": {"session.intra_op.allow_spinning": "0"},
}


def _saving(path: Path) -> dict[str, str]:
    weights = "session.optimized_model_external_initializers"
    return {
        "session.save_external_prepacked_constant_initializers": "1",
        f"{weights}_file_name": f"{path.name}.data",
        f"{weights}_min_size_in_bytes": "1024",
    }


def one_line(error: Exception) -> str:
    """The message of an error of ONNX Runtime, which may have many lines."""
    return " ".join(str(error).split())[:300]
