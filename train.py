"""Trains a language model; starting again on the same --workdir goes on where it stopped.

    python train.py --config=configs/ccq_gdn.py --workdir=runs/ccq_gdn
    python train.py --config=configs/ccq_gdn.py:1.3B --workdir=DIR --config.mesh.fsdp=8

The config is a file under configs/, with the size after a colon (tiny by default). Any of its
fields can be set: --config.train.steps=1000. ccq_jax/config.py describes them; a value that cannot
run is refused before anything starts.

In the workdir: metrics.jsonl (one object a line), plots/*.png, tensorboard/, checkpoints/ and
config.json. Ctrl-C and SIGTERM save a checkpoint first. A larger train.steps continues a run that
is finished.

Several processes: start this in each of them, with --distributed under Slurm, Open MPI, Kubernetes
or on a TPU pod, or else with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID set.
They share one workdir; --config.mesh spreads the model and the batch over all their devices.
"""

import sys

import jax
from absl import app, flags
from ml_collections import config_flags

from ccq_jax.runtime import initialize_distributed, quiet_libraries
from ccq_jax.train import ConfigError, NonFiniteError, train
from ccq_jax.workdir import WorkdirError

_CONFIG = config_flags.DEFINE_config_file("config", None, "A file under configs/, as FILE[:SIZE].")
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "The run's directory: new, empty, or one to go on in.", required=True
)
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "One of several processes, which the cluster's scheduler started."
)
_COMPILATION_CACHE = flags.DEFINE_string(
    "compilation_cache", None, "A directory for compiled programs: a second start reads them."
)
_PROFILE = flags.DEFINE_integer(
    "profile", 0, "Steps to trace into WORKDIR/profile, for TensorBoard or ui.perfetto.dev."
)
flags.mark_flag_as_required("config")


def main(argv: list[str]) -> None:
    """Trains as the flags say."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}: fields are set as --config.NAME=VALUE")
    quiet_libraries()
    if _COMPILATION_CACHE.value:
        jax.config.update("jax_compilation_cache_dir", _COMPILATION_CACHE.value)
    try:
        initialize_distributed(_DISTRIBUTED.value)
        train(_CONFIG.value, _WORKDIR.value, profile_steps=_PROFILE.value)
    except (ConfigError, WorkdirError, NonFiniteError) as error:
        sys.exit(f"train.py: {error}")


if __name__ == "__main__":
    app.run(main)
