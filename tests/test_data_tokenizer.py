"""Tokenisers: text comes back, in one piece or streamed, and every byte is counted."""

import json

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ccq_jax.data import make_tokenizer

CORPUS = ["def f(x):\n    return x + 1\n", "the grass is green, the sky is blue", "größer 🎉"] * 20
# U+2581 is how SentencePiece spells a space, so that it reads as one.
TEXT = st.text(max_size=60).filter(lambda text: "\N{LOWER ONE EIGHTH BLOCK}" not in text)
NAMES = ("bytes", "mistral", "sentencepiece", "byte-level", "metaspace")


@pytest.fixture(scope="session")
def tokenizer_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    with (folder / "tiny.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS),
            model_writer=file,
            vocab_size=300,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            hard_vocab_limit=False,
            minloglevel=2,
        )

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer)
    bpe.enable_truncation(4)  # as published files sometimes have; documents must stay whole
    bpe.save(str(folder / "byte-level.json"))

    vocab = {"</s>": 0, "<unk>": 1, "▁": 2, "▁the": 3, "a": 4}
    vocab |= {f"<0x{i:02X}>": 5 + i for i in range(256)}
    llama = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True)
    )
    llama.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    llama.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback()]
    )
    llama.add_special_tokens(["</s>", "<unk>"])
    llama.save(str(folder / "metaspace.json"))
    return {
        "sentencepiece": folder / "tiny.model",
        "byte-level": folder / "byte-level.json",
        "metaspace": folder / "metaspace.json",
    }


@pytest.fixture(scope="session")
def tokenizer_of(tokenizer_files):
    made = {name: make_tokenizer(str(tokenizer_files.get(name, name))) for name in NAMES}
    return made.__getitem__


@pytest.mark.parametrize("name", NAMES)
@given(text=TEXT)
@settings(max_examples=40, deadline=None)
def test_decoding_gives_the_text_back(tokenizer_of, name, text):
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_id not in ids


@pytest.mark.parametrize("name", NAMES)
@given(text=TEXT)
@settings(max_examples=40, deadline=None)
def test_streamed_text_is_the_decoded_text(tokenizer_of, name, text):
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in ids]
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces) or "\ufffd" in text
    streamed = "".join(pieces) + stream.flush()
    assert streamed.removeprefix(" " if tokenizer.prefixes_space and ids else "") == text


@pytest.mark.parametrize("name", NAMES)
@given(text=TEXT)
@settings(max_examples=40, deadline=None)
def test_bytes_per_token_add_up_to_the_bytes_of_the_text(tokenizer_of, name, text):
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode(text)
    prefix = 1 if tokenizer.prefixes_space and ids else 0
    assert tokenizer.bytes_per_token[ids].sum() == len(text.encode()) + prefix
    assert tokenizer.bytes_per_token[tokenizer.eos_id] == 0


@pytest.mark.parametrize("name", NAMES)
@given(texts=st.lists(TEXT, max_size=5))
@settings(max_examples=20, deadline=None)
def test_a_batch_is_encoded_as_each_text_alone(tokenizer_of, name, texts):
    tokenizer = tokenizer_of(name)
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == [
        tokenizer.encode(text) for text in texts
    ]


def test_known_vocabularies():
    bytes_, mistral = make_tokenizer("bytes"), make_tokenizer("mistral")
    assert (bytes_.vocab_size, bytes_.eos_id) == (257, 256)
    assert bytes_.encode("aé") == [97, 0xC3, 0xA9]
    assert (mistral.vocab_size, mistral.eos_id) == (32000, 2)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_that_spells_control_tokens_stays_text(tokenizer_of, name):
    tokenizer = tokenizer_of(name)
    text = "a </s> <|endoftext|> <unk>"
    assert tokenizer.eos_id not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", NAMES)
def test_a_lone_surrogate_becomes_the_replacement_character(tokenizer_of, name):
    tokenizer = tokenizer_of(name)
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_a_character_cut_short_is_kept_back_and_then_replaced():
    stream = make_tokenizer("bytes").stream()
    euro = "€".encode()
    assert [stream.push(byte) for byte in euro] == ["", "", "€"]
    assert stream.push(euro[0]) == ""
    assert stream.push(ord("x")) == "\ufffdx"
    assert stream.push(euro[0]) == ""
    assert stream.flush() == "\ufffd"


@pytest.mark.parametrize("decoder", ["wordpiece", "bpe", "words"])
def test_other_hugging_face_decoders_keep_words_apart(tmp_path, decoder):
    spell = {
        "wordpiece": ({"[EOS]": 0, "play": 1, "##ing": 2, "[UNK]": 3}, " playing play"),
        "bpe": ({"[EOS]": 0, "play": 1, "ing</w>": 2, "play</w>": 3}, "playing play "),
        "words": ({"[EOS]": 0, "play": 1, "ing": 2, "[UNK]": 3}, " play ing play"),
    }
    vocab, text = spell[decoder]
    model = tokenizers.models.WordLevel(vocab, "[UNK]" if "[UNK]" in vocab else "play")
    tokenizer = tokenizers.Tokenizer(model)
    if decoder == "wordpiece":
        tokenizer.decoder = tokenizers.decoders.WordPiece()
    elif decoder == "bpe":
        tokenizer.decoder = tokenizers.decoders.BPEDecoder()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    stream = make_tokenizer(str(tmp_path)).stream()
    last = 3 if decoder == "bpe" else 1
    assert "".join(stream.push(i) for i in (1, 2, last)) == text


def test_a_vocabulary_without_an_unknown_word_drops_what_it_cannot_spell(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.BPE({"</s>": 0, "b": 1}, []))
    words.save(str(tmp_path / "tokenizer.json"))
    assert make_tokenizer(str(tmp_path)).encode("abc") == [1]


def test_eos_is_read_from_the_config_beside_the_file(tokenizer_files, tmp_path):
    data = json.loads(tokenizer_files["byte-level"].read_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "!"}}')
    tokenizer = make_tokenizer(str(tmp_path))
    assert tokenizer.eos_id == data["model"]["vocab"]["!"]


def test_the_fingerprint_tells_vocabularies_apart(tokenizer_of):
    assert len({tokenizer_of(name).fingerprint for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "no such file"),
        (b"neither", "not a SentencePiece model"),
        (b"", "not a SentencePiece model"),
        (b'{"model": 1}', "not a tokenizer.json"),
        (b"{", "not a tokenizer.json"),
    ],
)
def test_what_is_no_tokenizer_is_refused_by_field_and_value(tmp_path, content, problem):
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"data\.tokenizer='.*file'.*" + problem):
        make_tokenizer(str(path))
