r"""Gated linear attention whose queries are conditioned on the keys' covariance (CCQ).

`tiny` trains on the running Python's own library source, as bytes.

    python train.py --config=configs/ccq_gla.py --workdir=/tmp/ccq_gla
    python eval.py --config=configs/ccq_gla.py --workdir=/tmp/ccq_gla

Parameters: tiny 1.1M, 340M 374M, 500M 509M, 1.3B 1.366B.
All sizes but `tiny` ask for tokenised data:

    python train.py --config=configs/ccq_gla.py:1.3B --workdir=DIR \
        --config.data.source=arrayrecord:/data/fineweb-edu/*

GLA does not normalise its keys, so the covariance may grow until lambda times its largest
eigenvalue passes 2, where the query is no longer contracted: watch `lambda_sigma_max` in
metrics.jsonl, and see `ccq.key_norm`.
"""

from ml_collections import ConfigDict

from ccq_jax.config import default


def get_config(arg: str = "tiny") -> ConfigDict:
    """The configuration of one size: tiny, 340M, 500M or 1.3B."""
    config = default(mixer="gla", size=arg)
    config.model.ccq.enabled = True
    return config
