"""Where and with what a benchmark ran, for the head of its report."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any, Final

_DISTRIBUTIONS: Final = ("regraft", "numpy", "pyzmq", "ray", "torch", "transferqueue")


def machine() -> dict[str, Any]:
    """The processor's model, the cores that this process may use, the memory in bytes, the kernel."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str | None]:
    """Of Python and of the packages that the figures depend on; None for one that is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _DISTRIBUTIONS}}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
