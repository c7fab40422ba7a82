r"""Evaluates a trained run: validation loss, perplexity by position, recall by length.

    python eval.py --config=configs/ccq_gdn.py --workdir=runs/ccq_gdn
    python eval.py --config=configs/ccq_gdn.py --workdir=runs/ccq_gdn --parts=length \
        --config.eval.contexts=4096,16384

Prints a table and writes WORKDIR/eval/*.json and *.png. The model and the data are those of the run;
of --config count `eval`, `model.implementation`, `model.chunk_size` and `model.ccq.fixed_lambda`
(0 or more: the contraction that CCQ is to use at test time, also on a model trained without it).
"""

import sys

from absl import app, flags
from ml_collections import config_flags

from ccq_jax.evaluation import PARTS, evaluate
from ccq_jax.runtime import quiet_libraries

_CONFIG = config_flags.DEFINE_config_file("config", None, "A file under configs/, as FILE[:SIZE].")
_WORKDIR = flags.DEFINE_string("workdir", None, "The directory that train.py wrote.", required=True)
_STEP = flags.DEFINE_string("step", "latest", "latest, best, or the step of a checkpoint.")
_PARTS = flags.DEFINE_list("parts", list(PARTS), f"Some of {', '.join(PARTS)}.")
flags.mark_flag_as_required("config")


def main(argv: list[str]) -> None:
    """Evaluates as the flags say."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}: fields are set as --config.NAME=VALUE")
    quiet_libraries()
    try:
        evaluate(_CONFIG.value, _WORKDIR.value, step=_STEP.value, parts=_PARTS.value)
    except ValueError as error:
        sys.exit(f"eval.py: {error}")


if __name__ == "__main__":
    app.run(main)
