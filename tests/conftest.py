"""What all tests share: one thread per process, deterministic properties, one small Ray for the session.

Guarantees: nothing here imports torch or ray before a test asks for it; the Ray that `ray_cluster` starts is its own
(never one that happens to run), and nothing of it is left when the session ends. Every Ray that a test starts has
Ray's token authentication on, with a token made for this test run, so that none is written to the home directory. Cost:
`ray_cluster` takes about 5 s, once, and only when a test uses it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

LOGICAL_CPUS = 8
OBJECT_STORE_BYTES = 200 << 20

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", derandomize=False, deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """A local Ray of one node with 8 logical CPUs and a 200 MiB object store; yields its address.

    Its temporary directory has a short path, because Ray's socket paths must fit into 107 bytes.
    """
    import ray

    temporary = Path(tempfile.mkdtemp(prefix="rg-", dir="/tmp"))
    try:
        ray.init(
            address="local",
            num_cpus=LOGICAL_CPUS,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            _temp_dir=str(temporary),
        )
        yield str(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()
        shutil.rmtree(temporary, ignore_errors=True)
