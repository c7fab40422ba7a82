"""Sources: the grammar, text files of every kind, what is refused, the cache and the shards."""

import gzip
import json
import pickle

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ccq_jax.data import documents as documents_module
from ccq_jax.data import make_tokenizer, prepare
from ccq_jax.data.arrayrecord import ArrayRecordDocuments, lengths_path
from ccq_jax.data.documents import load_text, split_documents
from ccq_jax.data.sources import Source, parse_source, text_files

BYTES = make_tokenizer("bytes")
TEXTS = ["first\nsecond\n", "größer €", "x" * 3000]


def texts_of(documents, tokenizer=BYTES):
    lengths = documents.lengths.tolist()
    return [tokenizer.decode(documents.read(i, 0, n).tolist()) for i, n in enumerate(lengths)]


def load(pattern, **options):
    return texts_of(load_text(Source("text", str(pattern)), BYTES, **options))


def jsonl(texts):
    return "".join(json.dumps({"text": text, "id": 3}) + "\n" for text in texts).encode()


# The grammar


def test_a_mixture_is_read_with_its_weights():
    sources = parse_source("0.6*text:a/*.txt, 0.3*stdlib,1e-1*mqar")
    assert [(str(s), s.weight) for s in sources] == [
        ("text:a/*.txt", 0.6),
        ("stdlib", 0.3),
        ("mqar", 0.1),
    ]


@given(weights=st.lists(st.floats(0.01, 1), min_size=2, max_size=5))
def test_weights_are_taken_if_and_only_if_they_sum_to_1(weights):
    spec = ",".join(f"{w}*mqar" for w in weights)
    if abs(sum(weights) - 1) > 1e-6:
        with pytest.raises(ValueError, match=r"the weights sum to .* they must sum to 1"):
            parse_source(spec)
    total = sum(weights)
    assert len(parse_source(",".join(f"{w / total}*mqar" for w in weights))) == len(weights)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("", "unknown source ''"),
        ("stdlbi", "unknown source 'stdlbi'"),
        ("c4", "it takes stdlib, text:GLOB"),
        ("stdlib,mqar", "'stdlib' needs a weight"),
        ("0.5*stdlib,mqar", "'mqar' needs a weight"),
        ("half*stdlib,0.5*mqar", "weight 'half' of stdlib must be a number"),
        ("0*stdlib,1*mqar", "weight '0' of stdlib must be a number above 0"),
        ("nan*stdlib,1*mqar", "weight 'nan'"),
        ("-1*stdlib,2*mqar", "weight '-1'"),
        ("0.5*stdlib", "the weights sum to 0.5"),
        ("text:", "text needs a pattern"),
    ],
)
def test_what_is_no_source_is_refused_by_field_and_value(spec, problem):
    with pytest.raises(ValueError, match=problem) as error:
        parse_source(spec, "data.validation_source")
    assert f"data.validation_source={spec!r}" in str(error.value)


# Text files


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_txt_files_are_documents_in_the_order_of_their_paths(tmp_path, packed):
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[packed]
    for i in (2, 0, 1):
        (tmp_path / f"{i}.txt{packed}").write_bytes(pack(TEXTS[i].encode()))
    assert load(tmp_path / "*") == TEXTS


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_lines_of_jsonl_files_are_documents(tmp_path, packed):
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[packed]
    # Two members, as tools that append write them; a blank line; no newline at the end.
    data = pack(jsonl(TEXTS[:2]) + b"\n") + pack(jsonl(TEXTS[2:]).rstrip())
    (tmp_path / f"a.jsonl{packed}").write_bytes(data)
    assert load(tmp_path / f"*.jsonl{packed}") == TEXTS


def test_empty_documents_are_passed_over(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["", "one", "", "two"]))
    (tmp_path / "b.txt").write_bytes(b"")
    assert load(tmp_path / "*") == ["one", "two"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + jsonl(["two"]))
    assert load(tmp_path / "*") == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.txt", b"good \xff bad", r"a\.txt is not UTF-8: .* at byte 5"),
        ("a.jsonl", jsonl(["x"]) + b'{"text": "\xff"}', r"a\.jsonl:2 is not UTF-8"),
        ("a.jsonl", jsonl(["x"]) + b"nonsense\n", r"a\.jsonl:2 is not JSON"),
        ("a.jsonl", b"[" * 200_000, r"a\.jsonl:1 is not JSON"),
        ("a.jsonl", b'{"content": "x", "id": 1}', r"a\.jsonl:1 needs a field \"text\".*'content'"),
        ("a.jsonl", b'{"text": null}', r"a\.jsonl:1 needs a field \"text\" that is a string"),
        ("a.jsonl", b'["x"]', r"a\.jsonl:1 needs a field \"text\".* list"),
        ("a.parquet", b"x", r"a\.parquet is none of \.txt, \.txt\.gz"),
        ("a.txt.gz", gzip.compress(b"x" * 99, mtime=0)[:-9], r"a\.txt\.gz is damaged or cut short"),
        ("a.txt.gz", b"no archive", r"a\.txt\.gz is damaged or cut short"),
        ("a.txt.zst", zstandard.compress(b"x" * 99)[:-1], r"a\.txt\.zst is damaged or cut short"),
        ("a.txt.zst", b"no archive", r"a\.txt\.zst is damaged or cut short"),
        ("a.txt", b"", "its 1 files hold no text"),
        ("a.jsonl", jsonl(["", ""]), "its 1 files hold no text"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(tmp_path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=problem) as error:
        load(tmp_path / "*")
    assert str(error.value).startswith("data.source='text:")


def test_a_pattern_without_a_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.source='text:.*': no file matches"):
        load(tmp_path / "*.txt")


# The library's own source


def test_stdlib_is_this_pythons_library_in_a_fixed_order():
    files = text_files(Source("stdlib"))
    keys = [file.key for file in files]
    assert keys == sorted(keys)
    assert {"argparse.py", "json/decoder.py"} <= set(keys)
    folders = {part for key in keys for part in key.split("/")[:-1]}
    assert not folders & {"site-packages", "test", "tests", "encodings"}
    assert len(keys) > 300
    assert sum(file.path.stat().st_size for file in files) > 5e6


def test_stdlib_without_files_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=r"data\.source='stdlib': .* holds no \.py file"):
        text_files(Source("stdlib"))


# The split


@given(hashes=st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=30, unique=True))
def test_splits_cover_every_document_once_and_neither_is_empty(hashes):
    documents = documents_module.TokenArray(
        np.arange(len(hashes)), np.arange(1, len(hashes) + 1), np.array(hashes, np.uint64)
    )
    for fraction in (1e-9, 0.05, 0.5, 1 - 1e-12):
        parts = [
            split_documents(documents, split, fraction, Source("text", "x"))
            for split in ("train", "validation")
        ]
        assert all(map(len, parts))
        assert sorted(np.concatenate(parts)) == list(range(len(hashes)))


def test_about_the_fraction_is_held_out_and_copies_go_together(tmp_path):
    texts = [f"document {i % 2000}" for i in range(4000)]
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    source = Source("text", str(tmp_path / "*"))
    held_out = split_documents(load_text(source, BYTES), "validation", 0.1, source)
    assert 300 < len(held_out) < 500
    chosen = {texts[i] for i in held_out}
    assert len(held_out) == 2 * len(chosen)


def test_nothing_held_out_is_refused_with_what_would_help(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one document")
    source = Source("text", str(tmp_path / "*"))
    with pytest.raises(ValueError, match=r"no document is held out .*data\.validation_source"):
        split_documents(load_text(source, BYTES), "validation", 0.5, source)


# The cache


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A source that is cached on disk, and the folder of its cache."""
    monkeypatch.setattr(documents_module, "LARGE", 0)
    monkeypatch.setattr(documents_module, "_in_memory", {})
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    return Source("text", str(tmp_path / "*.jsonl")), tmp_path / "cache"


def fresh(source, cache):
    documents_module._in_memory.clear()
    return load_text(source, BYTES, str(cache))


def test_large_text_is_read_back_from_the_cache(large, monkeypatch):
    source, cache = large
    first = fresh(source, cache)
    assert isinstance(first.tokens, np.memmap)
    monkeypatch.setattr(documents_module, "tokenised", None)  # would fail if it were called
    again = fresh(source, cache)
    assert texts_of(first) == texts_of(again) == TEXTS
    assert (first.hashes == again.hashes).all()
    assert len(pickle.dumps(again)) < 500  # workers get the place, not the tokens
    assert texts_of(pickle.loads(pickle.dumps(again))) == TEXTS


def test_other_content_or_another_tokenizer_is_another_cache(large, tmp_path):
    source, cache = large
    fresh(source, cache)
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS[::-1]))
    assert texts_of(fresh(source, cache)) == TEXTS[::-1]
    mistral = make_tokenizer("mistral")
    assert texts_of(load_text(source, mistral, str(cache)), mistral) == TEXTS[::-1]
    assert len(list(cache.iterdir())) == 3


def test_a_run_that_dies_while_tokenising_leaves_no_cache(large, monkeypatch):
    source, cache = large

    def dies(*arguments):
        yield np.arange(3), 1
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(documents_module, "tokenised", dies)
        fresh(source, cache)
    assert not list(cache.iterdir())
    assert texts_of(fresh(source, cache)) == TEXTS


def test_the_process_that_comes_second_takes_the_cache_of_the_first(large, monkeypatch):
    source, cache = large
    real = documents_module.tokenised

    def slow(*arguments):  # meanwhile another process builds the same cache
        with monkeypatch.context() as patch:
            patch.setattr(documents_module, "tokenised", real)
            fresh(source, cache)
        yield from real(*arguments)

    monkeypatch.setattr(documents_module, "tokenised", slow)
    assert texts_of(fresh(source, cache)) == TEXTS
    assert len(list(cache.iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_refused_by_its_field(large):
    source, cache = large
    cache.write_text("a file")
    with pytest.raises(ValueError, match=r"data\.cache_dir: .*cache must be a folder that can be"):
        fresh(source, cache)


def test_a_damaged_cache_is_refused_by_its_folder(large):
    source, cache = large
    fresh(source, cache)
    (tokens,) = cache.glob("*/tokens.bin")
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"data\.cache_dir: the token cache .* is damaged"):
        fresh(source, cache)


# ArrayRecord shards


def run_prepare(tmp_path, *more, tokenizer="bytes"):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(TEXTS)))
    source = f"--source=text:{tmp_path}/*.jsonl.gz"
    prepare.main([source, f"--tokenizer={tokenizer}", f"--out={tmp_path / 'out'}", *more])
    return Source("arrayrecord", f"{tmp_path}/out/*")


@pytest.mark.parametrize("name", ["bytes", "mistral"])
@pytest.mark.parametrize(("shard_tokens", "shards"), [(1, 3), (10**6, 1)])
def test_prepared_shards_hold_the_documents(tmp_path, name, shard_tokens, shards, capsys):
    source = run_prepare(tmp_path, f"--shard_tokens={shard_tokens}", tokenizer=name)
    assert str(source).rsplit("/", 1)[0] in capsys.readouterr().out
    tokenizer = make_tokenizer(name)
    documents = pickle.loads(pickle.dumps(ArrayRecordDocuments(source, tokenizer)))
    assert texts_of(documents, tokenizer) == TEXTS
    assert documents.read(2, 10, 13).tolist() == tokenizer.encode(TEXTS[2])[10:13]
    assert len(set(documents.hashes.tolist())) == len(TEXTS)
    assert len(list((tmp_path / "out").glob("*.arrayrecord"))) == shards


def test_records_are_plain_little_endian_ids(tmp_path):
    from array_record.python import array_record_module

    run_prepare(tmp_path)
    (shard,) = (tmp_path / "out").glob("*.arrayrecord")
    reader = array_record_module.ArrayRecordReader(str(shard))
    records = reader.read_all()
    assert [np.frombuffer(record, "<u2").tolist() for record in records] == [
        BYTES.encode(text) for text in TEXTS
    ]
    assert json.loads((tmp_path / "out" / "index.json").read_text())["dtype"] == "<u2"


def test_shards_of_another_tokenizer_are_refused(tmp_path):
    source = run_prepare(tmp_path)
    with pytest.raises(ValueError, match=r"ids of tokeniser 'bytes', data\.tokenizer is 'mis"):
        ArrayRecordDocuments(source, make_tokenizer("mistral"))


def test_a_damaged_shard_is_refused(tmp_path):
    source = run_prepare(tmp_path)
    (shard,) = (tmp_path / "out").glob("*.arrayrecord")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 200] = bytes(200)
    shard.write_bytes(data)
    with pytest.raises(ValueError, match=r"damaged|cannot be read"):
        texts_of(ArrayRecordDocuments(source, BYTES))
    shard.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="a shard is damaged"):
        ArrayRecordDocuments(source, BYTES)


def test_an_index_that_does_not_fit_its_shard_is_refused(tmp_path):
    source = run_prepare(tmp_path)
    (shard,) = (tmp_path / "out").glob("*.arrayrecord")
    lengths = np.load(lengths_path(shard))
    np.save(lengths_path(shard), lengths[:-1])
    with pytest.raises(ValueError, match="the shards hold 3 records, their indices say 2"):
        ArrayRecordDocuments(source, BYTES)
    np.save(lengths_path(shard), lengths + np.uint32(1))
    with pytest.raises(ValueError, match=r"document 0 holds 26 bytes, the index says 28"):
        ArrayRecordDocuments(source, BYTES).read(0, 0, 1)
    lengths_path(shard).unlink()
    with pytest.raises(ValueError, match=r"has no .*lengths\.npy beside it"):
        ArrayRecordDocuments(source, BYTES)


def test_lengths_are_never_unpickled(tmp_path):
    source = run_prepare(tmp_path)
    (shard,) = (tmp_path / "out").glob("*.arrayrecord")
    np.save(lengths_path(shard), np.array([print, 1], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="cannot be read"):
        ArrayRecordDocuments(source, BYTES)


def test_prepare_overwrites_nothing_and_refuses_what_is_no_text(tmp_path):
    run_prepare(tmp_path)
    with pytest.raises(SystemExit, match=r"error: .* is not empty; give a new folder"):
        run_prepare(tmp_path)
    for source in ("mqar", "0.5*stdlib,0.5*mqar", "text:/nowhere/*.txt"):
        with pytest.raises(SystemExit, match="error: --source="):
            prepare.main([f"--source={source}", "--tokenizer=bytes", f"--out={tmp_path / 'new'}"])
