"""Checks what `config.data` names before anything starts, without reading the data.

Each field by itself is checked by `ccq_jax.config.validate`.
"""

from ml_collections import ConfigDict

from ccq_jax.data import recall
from ccq_jax.data.arrayrecord import check_shards
from ccq_jax.data.loader import recall_options
from ccq_jax.data.sources import RECALL_TASKS, Source, parse_source, text_files
from ccq_jax.data.tokenizer import Tokenizer, make_tokenizer


def validate_data(config: ConfigDict) -> None:
    """Checks that the sources exist and that the fields fit together.

    Raises:
      ValueError: names the field, its value and what would be right.
    """
    data = config.data
    tokenizer = make_tokenizer(data.tokenizer)
    sources = parse_source(data.source)
    if data.validation_source:
        sources += parse_source(data.validation_source, "data.validation_source")
    for source in sources:
        _check_source(source, config, tokenizer)
    for task in RECALL_TASKS:
        for length in config.eval.recall_lengths:
            try:
                recall.make_task(task, tokenizer, length + 1, **recall_options(config, task))
            except ValueError as error:
                raise ValueError(f"eval.recall_lengths has {length}, but {error}") from error
    needed = required_vocab_size(config)
    if 0 < config.model.vocab_size < needed:
        raise ValueError(
            f"model.vocab_size={config.model.vocab_size} must be at least {needed}, the number of "
            f"token ids that data.tokenizer={data.tokenizer!r} and data.source={data.source!r} "
            f"use (0 chooses it)"
        )


def _check_source(source: Source, config: ConfigDict, tokenizer: Tokenizer) -> None:
    if source.kind in RECALL_TASKS:
        options = recall_options(config, source.kind)
        recall.make_task(source.kind, tokenizer, config.train.seq_len + 1, **options)
    elif source.kind == "arrayrecord":
        check_shards(source, tokenizer)
    else:
        text_files(source)


def required_vocab_size(config: ConfigDict) -> int:
    """The smallest vocabulary of a model that reads this data."""
    tokenizer = make_tokenizer(config.data.tokenizer)
    sizes = [tokenizer.vocab_size]
    specs = (config.data.source, config.data.validation_source)
    sources = [source for spec in specs if spec for source in parse_source(spec)]
    if any(source.kind == "mqar" for source in sources):
        sizes.append(recall.mqar_vocab_size(config.data.mqar.vocab_size, tokenizer))
    return max(sizes)
