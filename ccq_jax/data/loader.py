"""Batches for training and validation, through Grain.

Rows are random access to the end of the pipeline, so that one number, how many global batches were
consumed, is the whole state: the same batches follow in another process, on another number of
processes, with other workers.
"""

import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence

import grain
import numpy as np
from absl import flags
from jaxtyping import Int, Int32
from ml_collections import ConfigDict

from ccq_jax.data import recall
from ccq_jax.data.arrayrecord import ArrayRecordDocuments
from ccq_jax.data.documents import Documents, fingerprint, load_text, split_documents
from ccq_jax.data.packing import FilledRows, PackedRows, Row
from ccq_jax.data.sources import RECALL_TASKS, Source, parse_source
from ccq_jax.data.tokenizer import Tokenizer, make_tokenizer

Batch = dict[str, np.ndarray]


class Loader(Iterator[Batch]):
    """Iterates over this process's part of the batches; `make_loader` makes it.

    Attributes:
      position: global batches consumed so far.
      num_batches: batches in all; None in training, which never ends.
      documents: fingerprint of each source of documents in training. Where one changed, a position
        names other batches than before.
    """

    def __init__(
        self,
        batches: grain.MapDataset,
        num_batches: int | None,
        documents: Sequence[str],
        *,
        prefetch: int,
        workers: int,
        start: int,
    ):
        self._batches = batches
        self._prefetch = prefetch
        self._workers = workers
        self.num_batches = num_batches
        self.documents = list(documents)
        self._running: list[grain.DatasetIterator] = []  # one, or none
        # Also at the interpreter's end, where Grain's own clean-up comes too late and complains.
        weakref.finalize(self, _close_all, self._running)
        self.set_state({"position": start})

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        if self.position == self.num_batches:
            self.close()
            raise StopIteration
        if not self._running:
            self._running.append(self._start(self.position))
        batch = next(self._running[0])
        self.position += 1
        return batch

    def _start(self, position: int) -> grain.DatasetIterator:
        ahead = grain.ReadOptions(
            num_threads=min(self._prefetch, 4), prefetch_buffer_size=self._prefetch
        )
        batches = self._batches.slice(slice(position, None)).to_iter_dataset(ahead)
        if self._workers:
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()  # Grain's workers read them; outside app.run: defaults
            # Batches go through pipes: shared memory is small in containers, and leaks where a
            # batch is alive at exit.
            pipes = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
            batches = grain.experimental.WithOptionsIterDataset(batches, pipes).mp_prefetch(
                grain.MultiprocessingOptions(self._workers, per_worker_buffer_size=self._prefetch),
                worker_init_fn=_init_worker,
            )
        return iter(batches)

    def get_state(self) -> dict[str, int]:
        """The position, as JSON holds it."""
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        """Goes to a position, forwards or back.

        Raises:
          ValueError: a position that does not exist.
        """
        position = state["position"]
        if not 0 <= position <= (self.num_batches or position):
            raise ValueError(f"position {position} must be from 0 to {self.num_batches}")
        self.close()
        self.position = position

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def close(self) -> None:
        """Ends threads and worker processes; the next batch starts them again."""
        _close_all(self._running)


def _close_all(iterators: list[grain.DatasetIterator]) -> None:
    while iterators:
        iterators.pop().close()


def _init_worker(worker: int, workers: int) -> None:
    """Makes a worker process live as long as its parent, which Grain does not see to.

    It ends where the parent was killed, and leaves Ctrl-C, which reaches both, to the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait():
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="end-with-parent").start()


def make_loader(
    config: ConfigDict,
    *,
    split: str = "train",
    process_index: int = 0,
    process_count: int = 1,
    start: int = 0,
) -> Loader:
    """Makes the loader of one process.

    Training shuffles the documents once and the rows anew in each epoch, by `config.seed`, and
    never ends. Validation reads every row once in a fixed order: the documents of
    `data.validation_source`, or those held out from the sources of `data.source`; of recall tasks
    `data.recall_examples` each, where there is no other source. Every process gets the same number
    of batches; rows without targets fill up the last.

    Args:
      config: the whole configuration; reads `seed`, `train.batch_size`, `train.seq_len`, `data`.
      split: "train" or "validation".
      process_index: this process; it gets rows `process_index * b` to `(process_index + 1) * b` of
        each global batch, b = batch_size / process_count.
      process_count: number of processes.
      start: global batches to skip, at no cost.

    Returns:
      An iterator over `inputs`, `targets`, `segment_ids` int32 [b, T] and `loss_mask` bool [b, T];
      see `packing.make_row`.

    Raises:
      ValueError: a field of `config.data` that cannot be, or data that cannot be read.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split={split!r} must be 'train' or 'validation'")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index={process_index} must be below {process_count=}")
    batch_size, seq_len = config.train.batch_size, config.train.seq_len
    if batch_size % process_count:
        raise ValueError(
            f"train.batch_size={batch_size} must be a multiple of the {process_count} processes"
        )
    tokenizer = make_tokenizer(config.data.tokenizer)
    num_batches, documents = None, list[str]()
    if split == "train":
        rows, documents = _training_rows(config, tokenizer)
    else:
        parts = _validation_parts(config, tokenizer)
        filled = FilledRows(parts, batch_size, seq_len, tokenizer.eos_id)
        rows = grain.MapDataset.source(filled)
        num_batches = len(filled) // batch_size
    # Local batches of all processes in turn are the global batches in turn.
    batches = rows.batch(batch_size // process_count, drop_remainder=True)
    batches = batches.slice(slice(process_index, None, process_count))
    return Loader(
        batches,
        num_batches,
        documents,
        prefetch=config.data.prefetch,
        workers=config.data.workers,
        start=start,
    )


def _training_rows(config: ConfigDict, tokenizer: Tokenizer) -> tuple[grain.MapDataset, list[str]]:
    """The rows, and the fingerprint of each source of documents."""
    sources = parse_source(config.data.source)
    parts, fingerprints = [], []
    for i, source in enumerate(sources):
        order_seed, row_seed = np.random.SeedSequence([config.seed, i]).generate_state(2)
        if source.kind in RECALL_TASKS:
            seed = (int(order_seed), *recall.recall_seed(config.seed, "train"))
            parts.append(grain.MapDataset.source(_recall_rows(source, config, tokenizer, seed)))
            continue
        # With a validation source of its own, nothing needs to be held out.
        fraction = 0.0 if config.data.validation_source else config.data.validation_fraction
        documents = _load_documents(source, config, tokenizer)
        fingerprints.append(fingerprint(documents))
        chosen = split_documents(documents, "train", fraction, source)
        chosen = np.random.default_rng(order_seed).permutation(chosen)
        packed = PackedRows(documents, chosen, config.train.seq_len, tokenizer.eos_id)
        parts.append(grain.MapDataset.source(packed).shuffle(seed=int(row_seed)).repeat())
    if len(parts) == 1:
        return parts[0], fingerprints
    return grain.MapDataset.mix(parts, [source.weight for source in sources]), fingerprints


def _validation_parts(config: ConfigDict, tokenizer: Tokenizer) -> list[Sequence[Row]]:
    seq_len, eos_id = config.train.seq_len, tokenizer.eos_id
    parts: list[Sequence[Row]] = [
        PackedRows(documents, chosen, seq_len, eos_id)
        for documents, chosen in _validation_documents(config, tokenizer)
    ]
    if not parts:
        seed = recall.recall_seed(config.seed, "validation")
        count = config.data.recall_examples
        parts += [
            _recall_rows(source, config, tokenizer, seed, count)
            for source in _validation_sources(config)
        ]
    return parts


def _validation_sources(config: ConfigDict) -> list[Source]:
    if config.data.validation_source:
        return parse_source(config.data.validation_source, "data.validation_source")
    return parse_source(config.data.source)


def _validation_documents(
    config: ConfigDict, tokenizer: Tokenizer
) -> Iterator[tuple[Documents, Int[np.ndarray, " n"]]]:
    """Each source of documents with the indices of those that validation reads."""
    for source in _validation_sources(config):
        if source.kind in RECALL_TASKS:
            continue
        documents = _load_documents(source, config, tokenizer)
        chosen = np.arange(len(documents.lengths))
        if not config.data.validation_source:
            fraction = config.data.validation_fraction
            chosen = split_documents(documents, "validation", fraction, source)
        yield documents, chosen


def long_documents(
    config: ConfigDict, length: int, *, limit: int
) -> list[Int32[np.ndarray, " length"]]:
    """The first `length` tokens of validation documents that have as many.

    Args:
      config: the whole configuration; reads `data`.
      length: tokens of each.
      limit: of more documents, so many are taken, evenly spread.

    Returns:
      Token ids of at most `limit` documents of each source, in a fixed order; none where no
      document is long enough, or no source has documents.
    """
    tokenizer = make_tokenizer(config.data.tokenizer)
    found = []
    for documents, chosen in _validation_documents(config, tokenizer):
        chosen = chosen[documents.lengths[chosen] >= length]
        count = min(limit, len(chosen))
        spread = chosen[np.arange(count) * len(chosen) // max(1, count)]
        found += [documents.read(int(i), 0, length).astype(np.int32) for i in spread]
    return found


def _load_documents(source: Source, config: ConfigDict, tokenizer: Tokenizer) -> Documents:
    if source.kind == "arrayrecord":
        return ArrayRecordDocuments(source, tokenizer)
    return load_text(source, tokenizer, config.data.cache_dir)


def recall_options(config: ConfigDict, name: str) -> dict:
    """Options of `make_task` and `make_recall_batch` that `config.data` sets."""
    return config.data[name].to_dict()


def _recall_rows(source: Source, config: ConfigDict, tokenizer: Tokenizer, seed, count=None):
    length = config.train.seq_len + 1
    task = recall.make_task(source.kind, tokenizer, length, **recall_options(config, source.kind))
    return recall.RecallRows(task, length, tokenizer.eos_id, seed, count)
