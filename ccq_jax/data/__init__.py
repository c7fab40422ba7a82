"""Input pipeline: sources, tokenisers, packing, recall tasks, and the loader over them."""

from ccq_jax.data.loader import Loader, long_documents, make_loader, recall_options
from ccq_jax.data.recall import make_recall_batch
from ccq_jax.data.tokenizer import StreamDecoder, Tokenizer, make_tokenizer
from ccq_jax.data.validate import required_vocab_size, validate_data

__all__ = [
    "Loader",
    "StreamDecoder",
    "Tokenizer",
    "long_documents",
    "make_loader",
    "make_recall_batch",
    "make_tokenizer",
    "recall_options",
    "required_vocab_size",
    "validate_data",
]
