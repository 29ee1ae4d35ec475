"""How much memory this process has held. Knows the standard library alone."""

from __future__ import annotations

import sys
from pathlib import Path


def peak_memory_bytes() -> int | None:
    """Most memory that this process ever held resident, or None where the system does not tell."""
    if sys.platform == "win32":
        return _windows_peak()
    status = Path("/proc/self/status")
    if status.exists():  # Linux: unlike ru_maxrss, VmHWM does not inherit the parent's peak
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


if sys.platform == "win32":

    def _windows_peak() -> int | None:
        """PeakWorkingSetSize of GetProcessMemoryInfo."""
        import ctypes
        from ctypes import wintypes

        sizes = ("peak", "working", "paged_peak", "paged", "pool_peak", "pool", "pagefile", "pagefile_peak")

        class Counters(ctypes.Structure):
            _fields_ = (
                ("size", wintypes.DWORD),
                ("faults", wintypes.DWORD),
                *((name, ctypes.c_size_t) for name in sizes),
            )

        counters = Counters()
        counters.size = ctypes.sizeof(Counters)
        process = ctypes.windll.kernel32.GetCurrentProcess
        process.restype = wintypes.HANDLE
        query = ctypes.windll.kernel32.K32GetProcessMemoryInfo
        query.argtypes = (wintypes.HANDLE, ctypes.POINTER(Counters), wintypes.DWORD)
        found = query(process(), ctypes.byref(counters), counters.size)
        return int(counters.peak) if found else None
