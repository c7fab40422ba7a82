r"""Gated linear attention whose queries are conditioned on the keys' covariance (CCQ).

`tiny` trains on the running Python's own library source, as bytes.

    python train.py --config=configs/ccq_gla.py --workdir=/tmp/ccq_gla
    python eval.py --config=configs/ccq_gla.py --workdir=/tmp/ccq_gla

`tiny` ends after 240 steps at 2.164 nats a byte on held-out files (3.122 bits; a unigram model has
3.320 nats) and takes some four minutes on two CPU cores (Python 3.11, JAX 0.10.2, float32).

Parameters: tiny 1.1M, 340M 374M, 500M 509M, 1.3B 1.366B.
All sizes but `tiny` ask for tokenised data:

    python train.py --config=configs/ccq_gla.py:1.3B --workdir=DIR \
        --config.data.source=arrayrecord:/data/fineweb-edu/*

GLA does not normalise its keys, so the covariance may grow until lambda times its largest
eigenvalue passes 2, where the query is no longer contracted: watch `lambda_sigma_max` in
metrics.jsonl, and see `ccq.key_norm`. At the end of `tiny` it is up to 9, and the plain GLA's loss is
lower, 2.131 (one seed each).
"""

from ml_collections import ConfigDict

from ccq_jax.config import default


def get_config(arg: str = "tiny") -> ConfigDict:
    """The configuration of one size: tiny, 340M, 500M or 1.3B."""
    config = default(mixer="gla", size=arg)
    config.model.ccq.enabled = True
    return config
