r"""Gated linear attention, plain: the baseline of ccq_gla.py.

`tiny` trains on the running Python's own library source, as bytes.

    python train.py --config=configs/gla.py --workdir=/tmp/gla
    python eval.py --config=configs/gla.py --workdir=/tmp/gla

`tiny` ends after 240 steps at 2.131 nats a byte on held-out files (3.075 bits; a unigram model has
3.320 nats) and takes some four minutes on two CPU cores (Python 3.11, JAX 0.10.2, float32).

Parameters: tiny 1.1M, 340M 374M, 500M 509M, 1.3B 1.366B.
All sizes but `tiny` ask for tokenised data:

    python train.py --config=configs/gla.py:1.3B --workdir=DIR \
        --config.data.source=arrayrecord:/data/fineweb-edu/*
"""

from ml_collections import ConfigDict

from ccq_jax.config import default


def get_config(arg: str = "tiny") -> ConfigDict:
    """The configuration of one size: tiny, 340M, 500M or 1.3B."""
    config = default(mixer="gla", size=arg)
    return config
