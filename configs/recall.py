r"""Multi-query associative recall with a memory that fills up: does CCQ help?

    python train.py --config=configs/recall.py:ccq_gla --workdir=runs/ccq_gla-0 --config.seed=0
    python eval.py --config=configs/recall.py:ccq_gla --workdir=runs/ccq_gla-0 \
        --suite=mqar,geometry,sweep --limit=128
    python -m ccq_jax.compare runs/gla-? runs/ccq_gla-? --seeds --figures='mqar/*'

The variant after the colon is one of `VARIANTS`. Those of one backbone differ in CCQ alone, and with one
seed they see the same data. Two layers, two heads, keys of 16 numbers. A run takes two to five minutes
of one CPU core. docs/evaluation.md has the results: CCQ does not help here.

From its initialisation Gated DeltaNet finds the task suddenly, and by 400 steps few seeds have. So CCQ is
compared on one that has (`gdn`, seed 0), which is trained on with CCQ (`on_ccq`, `on_ccq4`) and without
(`on`):

    python train.py --config=configs/recall.py:gdn --workdir=runs/gdn-0
    python train.py --config=configs/recall.py:on_ccq4 --workdir=runs/on_ccq4-100 \
        --config.init_from=runs/gdn-0 --config.seed=100
"""

from ml_collections import ConfigDict

from ccq_jax.config import default

VARIANTS = {
    "gla": None,
    "ccq_gla": {},  # the paper's form
    "ccq_gla_norm": {"key_norm": True},
    "gdn": None,
    "ccq_gdn": {},
    "ccq_gdn4": {"lambda_max": 4.0},
    "on": None,
    "on_ccq": {},
    "on_ccq4": {"lambda_max": 4.0},
}


def get_config(arg: str = "ccq_gla") -> ConfigDict:
    """The configuration of one of VARIANTS."""
    if arg not in VARIANTS:
        raise ValueError(f"the variant is {arg!r}: it must be one of {', '.join(VARIANTS)}")
    gla, ccq = "gla" in arg, VARIANTS[arg]
    config = default(mixer="gla" if gla else "gated_deltanet").unlock()
    config.model.num_layers, config.model.hidden_size = 2, 64
    config.model.head_dim, config.model.head_v_dim = 16, 32
    config.model.conv_size = 4  # without it, GLA cannot bring a key to its value
    config.model.ccq.update({"enabled": ccq is not None} | (ccq or {}))
    config.data.source = "mqar"
    config.data.mqar.vocab_size = 64  # 32 keys, 32 values
    config.data.mqar.num_pairs, config.train.seq_len = (8, 64) if gla else (16, 80)
    config.train.steps, config.train.learning_rate = (500, 5e-3) if gla else (400, 2e-3)
    config.train.batch_size, config.train.warmup_steps, config.train.log_every = 64, 50, 25
    if arg.startswith("on"):
        config.init_from = "BACKBONE"
        config.train.steps, config.train.warmup_steps, config.train.learning_rate = 250, 20, 1e-3
        config.train.ccq_lr_scale, config.train.adam_eps = 30.0, 1e-15
    config.checkpoint.every = 1000
    config.eval.every, config.eval.batches = 0, 4
    config.eval.recall_lengths, config.eval.recall_examples = (128,), 256
    config.eval.mqar.lengths, config.eval.mqar.pairs = (128, 256, 512, 1024), (8, 16, 24, 30)
    return config.lock()
