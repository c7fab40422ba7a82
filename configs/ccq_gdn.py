r"""Gated DeltaNet whose queries are conditioned on the keys' covariance (CCQ).

The main run. `tiny` trains on the running Python's own library source, as bytes.

    python train.py --config=configs/ccq_gdn.py --workdir=/tmp/ccq_gdn
    python eval.py --config=configs/ccq_gdn.py --workdir=/tmp/ccq_gdn

`tiny` ends after 240 steps at 1.659 nats a byte on held-out files (2.393 bits; a unigram model has
3.320 nats) and takes about 4.5 minutes of CPU time (Python 3.11, JAX 0.10.2, float32).

Parameters: tiny 1.1M, 500M 512M, 1.3B 1.387B.
All sizes but `tiny` ask for tokenised data:

    python train.py --config=configs/ccq_gdn.py:1.3B --workdir=DIR \
        --config.data.source=arrayrecord:/data/fineweb-edu/*
"""

from ml_collections import ConfigDict

from ccq_jax.config import default


def get_config(arg: str = "tiny") -> ConfigDict:
    """The configuration of one size: tiny, 500M or 1.3B."""
    config = default(mixer="gated_deltanet", size=arg)
    config.model.ccq.enabled = True
    return config
