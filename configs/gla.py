r"""Gated linear attention, plain: the baseline of ccq_gla.py.

`tiny` trains on the running Python's own library source, as bytes.

    python train.py --config=configs/gla.py --workdir=/tmp/gla
    python eval.py --config=configs/gla.py --workdir=/tmp/gla

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
