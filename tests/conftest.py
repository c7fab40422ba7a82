"""Settings that must be made before JAX starts."""

import atexit
import os
import shutil
import tempfile

import pytest
from hypothesis import settings

# The same examples in every run: what passes on a commit passes on it again.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

# Eight virtual CPU devices, for the tests of meshes. XLA aborts the process where one of them comes to a
# collective 40 seconds after another, as happens on a slow machine.
_DEVICES = "--xla_force_host_platform_device_count=8"
_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES} {_PATIENCE}".strip()

# XLA's threads, by default as many as devices. Devices may enter independent collectives in different
# order and block a thread in each, so that few are too few: with the 8 x 1 mesh on two cores, training
# steps of JAX 0.10 then hang within seconds, and with 32 threads one of JAX 0.11 was aborted once in
# many runs of all tests.
os.environ.setdefault("NPROC", "128")

# Tests share what they compile, with each other and with the programs that they start.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _CACHE = tempfile.mkdtemp(prefix="ccq_jax_tests_")
    atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Frees what a module compiled: over the whole suite it would fill gigabytes."""
    yield
    import jax

    jax.clear_caches()
