r"""Evaluates a trained run, or a checkpoint in Hugging Face form.

    python eval.py --config=configs/ccq_gdn.py --workdir=runs/ccq_gdn
    python eval.py --config=configs/ccq_gdn.py --workdir=runs/ccq_gdn --suite=paper --data_dir=DATA
    python eval.py --config=configs/ccq_gdn.py --workdir=runs/ccq_gdn --suite=s_niah,lm --limit=100
    python eval.py --config=configs/gdn.py:1.3B --checkpoint=hf:FOLDER --suite=paper

Prints tables and writes WORKDIR/eval: JSON, CSV, Markdown and plots. The suite `run` (validation loss,
perplexity by position, recall by length, all on the run's own data) is what is measured if nothing is
asked for; `paper` is the benchmarks of the paper. What was measured once is kept. Datasets come from
copies in --data_dir, or else from the Hugging Face hub; what is in neither is left out, with a message
that says where to put it.

The model and the data are those of the run; of --config count `eval`, `mesh`, `model.implementation`,
`model.chunk_size` and `model.ccq.fixed_lambda` (0 or more: the contraction that CCQ is to use at test
time, also on a model trained without it).
"""

import sys

from absl import app, flags
from ml_collections import config_flags

from ccq_jax.evaluation import PARTS, SUITES, evaluate
from ccq_jax.runtime import quiet_libraries

_CONFIG = config_flags.DEFINE_config_file("config", None, "A file under configs/, as FILE[:SIZE].")
_WORKDIR = flags.DEFINE_string("workdir", "", "The directory that train.py wrote.")
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", "", "hf:FOLDER, a folder in Hugging Face form, in place of a run."
)
_STEP = flags.DEFINE_string("step", "latest", "latest, best, or the step of a checkpoint.")
_SUITE = flags.DEFINE_list(
    "suite", ["run"], f"Suites ({', '.join(SUITES)}) or parts ({', '.join(PARTS)})."
)
_DATA_DIR = flags.DEFINE_string("data_dir", "", "Copies of the benchmarks' datasets.")
_LIMIT = flags.DEFINE_integer("limit", 0, "Examples of each task, at most; 0 is all.")
_AGAIN = flags.DEFINE_bool("again", False, "Measure also what was measured before.")
_BESIDE = flags.DEFINE_list("beside", [], "Other evaluated runs, to be drawn in the same pictures.")
flags.mark_flag_as_required("config")


def main(argv: list[str]) -> None:
    """Evaluates as the flags say."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}: fields are set as --config.NAME=VALUE")
    quiet_libraries()
    try:
        evaluate(
            _CONFIG.value,
            _WORKDIR.value,
            step=_STEP.value,
            suite=_SUITE.value,
            checkpoint=_CHECKPOINT.value,
            data_dir=_DATA_DIR.value,
            limit=_LIMIT.value,
            again=_AGAIN.value,
            beside=_BESIDE.value,
        )
    except ValueError as error:
        sys.exit(f"eval.py: {error}")


if __name__ == "__main__":
    app.run(main)
