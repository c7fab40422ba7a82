"""Settings that must be made before JAX starts."""

import os

# Eight virtual CPU devices, for the tests of meshes.
_DEVICES = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()
