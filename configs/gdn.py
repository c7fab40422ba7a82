r"""Gated DeltaNet, plain: the baseline of ccq_gdn.py.

`tiny` trains on the running Python's own library source, as bytes.

    python train.py --config=configs/gdn.py --workdir=/tmp/gdn
    python eval.py --config=configs/gdn.py --workdir=/tmp/gdn

`tiny` ends after 240 steps at 1.694 nats a byte on held-out files (2.445 bits; a unigram model has
3.320 nats) and takes some four minutes on two CPU cores (Python 3.11, JAX 0.10.2, float32).

Parameters: tiny 1.1M, 500M 512M, 1.3B 1.387B.
All sizes but `tiny` ask for tokenised data:

    python train.py --config=configs/gdn.py:1.3B --workdir=DIR \
        --config.data.source=arrayrecord:/data/fineweb-edu/*
"""

from ml_collections import ConfigDict

from ccq_jax.config import default


def get_config(arg: str = "tiny") -> ConfigDict:
    """The configuration of one size: tiny, 500M or 1.3B."""
    config = default(mixer="gated_deltanet", size=arg)
    return config
