r"""A Llama-like transformer (RoPE, SwiGLU): the softmax baseline, Transformer++.

`tiny` trains on the running Python's own library source, as bytes.

    python train.py --config=configs/transformer.py --workdir=/tmp/transformer
    python eval.py --config=configs/transformer.py --workdir=/tmp/transformer

`tiny` ends after 240 steps at 2.216 nats a byte on held-out files (3.198 bits; a unigram model has
3.320 nats) and takes some four minutes on two CPU cores (Python 3.11, JAX 0.10.2, float32).

Parameters: tiny 1.1M, 500M 509M, 1.3B 1.364B.
All sizes but `tiny` ask for tokenised data:

    python train.py --config=configs/transformer.py:1.3B --workdir=DIR \
        --config.data.source=arrayrecord:/data/fineweb-edu/*

Its decode cache grows with the context; the others' do not.
"""

from ml_collections import ConfigDict

from ccq_jax.config import default


def get_config(arg: str = "tiny") -> ConfigDict:
    """The configuration of one size: tiny, 500M or 1.3B."""
    config = default(mixer="attention", size=arg)
    return config
