r"""Multi-query associative recall with a memory that fills up: does CCQ help?

    python train.py --config=configs/recall.py:ccq_gdn --workdir=runs/recall/ccq_gdn-0 --config.seed=0
    python eval.py --config=configs/recall.py:ccq_gdn --workdir=runs/recall/ccq_gdn-0 \
        --suite=mqar,geometry,sweep
    python -m ccq_jax.compare runs/recall/gdn-? runs/recall/ccq_gdn-? --seeds

The variant after the colon is one of `VARIANTS`: a backbone, or CCQ on it. Variants of a backbone differ
in CCQ alone, and with one seed they see the same data. Two layers, two heads, keys of 16: a head's
memory has room for 16 pairs whose keys don't disturb each other.
"""

from ml_collections import ConfigDict

from ccq_jax.config import default

VARIANTS = {
    "gdn": None,
    "ccq_gdn": {},  # the paper's form
    "ccq_gdn4": {"lambda_max": 4.0},
    "gla": None,
    "ccq_gla": {},
    "ccq_gla_norm": {"key_norm": True},
}


def get_config(arg: str = "ccq_gdn") -> ConfigDict:
    """The configuration of one of VARIANTS."""
    if arg not in VARIANTS:
        raise ValueError(f"the variant is {arg!r}: it must be one of {', '.join(VARIANTS)}")
    gdn = "gdn" in arg
    ccq = VARIANTS[arg]
    config = default(mixer="gated_deltanet" if gdn else "gla").unlock()
    config.model.num_layers, config.model.hidden_size = 2, 64
    config.model.head_dim, config.model.head_v_dim = 16, 32
    config.model.conv_size = 4  # without it, GLA cannot bring a key to its value
    config.model.ccq.update({"enabled": ccq is not None} | (ccq or {}))
    config.data.source = "mqar"
    config.data.mqar.vocab_size = 64  # 32 keys, 32 values
    # GLA writes without looking at what is there, and learns the task far more slowly.
    config.data.mqar.num_pairs, config.train.seq_len = (16, 80) if gdn else (8, 64)
    config.train.steps, config.train.learning_rate = (400, 2e-3) if gdn else (500, 5e-3)
    config.train.batch_size, config.train.warmup_steps, config.train.log_every = 64, 50, 25
    config.checkpoint.every = config.train.steps
    config.eval.every, config.eval.batches = 0, 4
    config.eval.recall_lengths, config.eval.recall_examples = (128,), 256
    config.eval.mqar.lengths, config.eval.mqar.pairs = (128, 256, 512, 1024), (8, 16, 24, 30)
    return config.lock()
