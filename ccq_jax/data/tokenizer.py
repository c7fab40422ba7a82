"""Tokenisers: bytes, any SentencePiece model, any Hugging Face `tokenizer.json`.

Whatever the format, a tokeniser here is an encoder and one table: the bytes of text that each token
id stands for. Decoding joins bytes, so it can stream, and bits per byte can be counted exactly.
"""

import abc
import codecs
import hashlib
import importlib.resources
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int32

# Names under which tokenizer.json files keep the token that ends a document, where no
# tokenizer_config.json beside them says which it is.
_HF_BOS = ("<s>", "<|begin_of_text|>", "<bos>")
_HF_EOS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|endofdocument|>", "[EOS]")


class Tokenizer(abc.ABC):
    """An encoder with the table of bytes that its token ids stand for.

    Attributes:
      name: what `make_tokenizer` was given.
      fingerprint: identifies the vocabulary and rules by content.
      pieces: the bytes of each id; empty for control tokens such as end of document.
      vocab_size: number of ids.
      eos_id: end of document.
      bos_id: the vocabulary's token for a text's beginning, which `encode` does not add; or None.
      bytes_per_token: length of each piece. A batch's targets cover
        `(bytes_per_token[targets] * loss_mask).sum()` bytes of text.
      prefixes_space: whether `encode` puts a space in front of the text, as SentencePiece may.
    """

    def __init__(
        self,
        name: str,
        fingerprint: str,
        pieces: Iterable[bytes],
        eos_id: int,
        bos_id: int | None = None,
    ):
        self.name = name
        self.fingerprint = fingerprint
        self.pieces = tuple(pieces)
        self.vocab_size = len(self.pieces)
        self.eos_id = eos_id
        self.bos_id = bos_id
        self.bytes_per_token: Int32[np.ndarray, " vocab"] = np.array(
            [len(piece) for piece in self.pieces], np.int32
        )
        self.prefixes_space = self._join(self.encode("a")).startswith(b" ")

    @abc.abstractmethod
    def _encode_batch(self, texts: list[str]) -> Sequence[Sequence[int]]:
        """Token ids of texts that UTF-8 can spell."""

    def encode_batch(self, texts: Iterable[str]) -> list[Int32[np.ndarray, " n"]]:
        """Token ids of each text, without end of document; control tokens in a text stay text."""
        clean = [_without_surrogates(text) for text in texts]
        return [np.asarray(ids, np.int32) for ids in self._encode_batch(clean)]

    def encode(self, text: str) -> list[int]:
        """Token ids of one text."""
        return self.encode_batch([text])[0].tolist()

    def decode(self, ids: Iterable[int]) -> str:
        """Text of whole documents' ids; bytes that are not UTF-8 become U+FFFD."""
        data = self._join(ids)
        if self.prefixes_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", errors="replace")

    def _join(self, ids: Iterable[int]) -> bytes:
        return b"".join(self.pieces[i] for i in ids)

    def stream(self) -> "StreamDecoder":
        """A decoder for text that continues a prompt, one token at a time."""
        return StreamDecoder(self.pieces)


class StreamDecoder:
    """Turns token ids into text as they come, keeping back bytes of a character not yet whole."""

    def __init__(self, pieces: Sequence[bytes]):
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that became certain with this token; may be empty."""
        return self._decoder.decode(self._pieces[token])

    def flush(self) -> str:
        """What is left: U+FFFD where the text stopped inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are bytes of UTF-8, 256 ends a document."""

    def __init__(self):
        super().__init__("bytes", "bytes", [*(bytes([i]) for i in range(256)), b""], 256)

    def _encode_batch(self, texts):
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model` file."""

    def __init__(self, name: str, path: Path):
        import sentencepiece

        model = path.read_bytes()
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except (RuntimeError, OSError, ValueError) as error:
            raise _tokenizer_error(name, f"{path} is not a SentencePiece model") from error
        processor = self._processor
        if processor.eos_id() < 0:
            raise _tokenizer_error(name, f"{path} has no end-of-document token (eos)")
        pieces = map(self._piece, range(processor.get_piece_size()))
        bos_id = processor.bos_id() if processor.bos_id() >= 0 else None
        super().__init__(name, _fingerprint(model), pieces, processor.eos_id(), bos_id)

    def _piece(self, token: int) -> bytes:
        processor = self._processor
        piece = processor.id_to_piece(token)
        if processor.is_control(token) or processor.is_unused(token):
            return b""
        if processor.is_unknown(token):
            return "\N{DOUBLE QUESTION MARK}".encode()
        return _byte_piece(piece) if processor.is_byte(token) else _metaspace_piece(piece)

    def _encode_batch(self, texts):
        return self._processor.encode(texts, out_type=int, add_bos=False, add_eos=False)


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json` file of the tokenizers library.

    The end of a document is the `eos_token` of a tokenizer_config.json beside it, or else the
    first of the customary names that the vocabulary has.
    """

    def __init__(self, name: str, path: Path):
        import tokenizers

        data = path.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
            spec = json.loads(data)
        except Exception as error:  # the library raises bare Exception
            raise _tokenizer_error(name, f"{path} is not a tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A document that spells a control token must not become one.
        self._tokenizer.encode_special_tokens = True

        added = {token["id"]: token for token in spec.get("added_tokens", [])}
        ids = {i: t for t, i in self._tokenizer.get_vocab(with_added_tokens=True).items()}
        to_bytes = _huggingface_pieces(spec.get("decoder"))
        pieces = []
        for i in range(max(ids) + 1):
            if i in added:
                pieces.append(b"" if added[i]["special"] else added[i]["content"].encode())
            else:
                pieces.append(to_bytes(ids[i]) if i in ids else b"")
        eos_id = self._find_eos(name, path)
        bos_id, _ = self._find(path, "bos_token", _HF_BOS)
        super().__init__(name, _fingerprint(data), pieces, eos_id, bos_id)

    def _find(
        self, path: Path, role: str, names: tuple[str, ...]
    ) -> tuple[int | None, tuple[str, ...]]:
        """The id of a control token, if there is one, and the names that were tried."""
        settings = path.with_name("tokenizer_config.json")
        if settings.is_file():
            token = json.loads(settings.read_bytes()).get(role)
            token = token.get("content") if isinstance(token, dict) else token
            names = (token,) if token else names
        ids = map(self._tokenizer.token_to_id, names)
        return next((i for i in ids if i is not None), None), names

    def _find_eos(self, name: str, path: Path) -> int:
        eos_id, candidates = self._find(path, "eos_token", _HF_EOS)
        if eos_id is not None:
            return eos_id
        raise _tokenizer_error(
            name,
            f"{path} has none of the end-of-document tokens {', '.join(candidates)}; name it as "
            f'"eos_token" in a tokenizer_config.json beside it',
        )

    def _encode_batch(self, texts):
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def make_tokenizer(name: str) -> Tokenizer:
    """Makes the tokeniser that `config.data.tokenizer` names.

    Args:
      name: "bytes"; "mistral" (32,000 ids, from the package mistral-common); or the path of a
        SentencePiece model, of a tokenizer.json, or of a directory that holds one of them.

    Raises:
      ValueError: nothing of that name, or the file is not a tokeniser.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "mistral":
        files = importlib.resources.files("mistral_common")
        with importlib.resources.as_file(files / "data" / "tokenizer.model.v1") as path:
            return SentencePieceTokenizer(name, path)
    path = Path(name).expanduser()
    if path.is_dir():
        found = [path / f for f in ("tokenizer.json", "tokenizer.model") if (path / f).is_file()]
        path = found[0] if found else path
    if not path.is_file():
        raise _tokenizer_error(name, "no such file")
    with path.open("rb") as file:
        is_json = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
    return (HuggingFaceTokenizer if is_json else SentencePieceTokenizer)(name, path)


def _tokenizer_error(name: str, problem: str) -> ValueError:
    return ValueError(
        f"data.tokenizer={name!r}: {problem}. It takes 'bytes', 'mistral', or the path of a "
        f"SentencePiece .model or Hugging Face tokenizer.json file"
    )


def _fingerprint(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _without_surrogates(text: str) -> str:
    """U+FFFD for lone surrogates, which JSON can spell and UTF-8 cannot."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _metaspace_piece(piece: str) -> bytes:
    return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _byte_piece(piece: str) -> bytes:
    return bytes([int(piece[3:5], 16)])  # <0xE2>


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: visible Latin-1 as itself, other bytes from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


def _huggingface_pieces(decoder: dict | None):
    """The function from a vocabulary entry to its bytes, by the file's decoder."""
    steps = (decoder or {}).get("decoders") or [decoder or {}]
    kinds = {step.get("type"): step for step in steps}
    if "ByteLevel" in kinds:
        alphabet = _byte_level_alphabet()
        return lambda piece: bytes(alphabet[c] for c in piece)
    if kinds.keys() & {"Metaspace", "ByteFallback", "Replace"}:
        fallback = "ByteFallback" in kinds

        def sentencepiece_like(piece: str) -> bytes:
            is_byte = fallback and len(piece) == 6 and piece.startswith("<0x") and piece[-1] == ">"
            return _byte_piece(piece) if is_byte else _metaspace_piece(piece)

        return sentencepiece_like
    if "BPEDecoder" in kinds:
        suffix = kinds["BPEDecoder"]["suffix"]
        return lambda piece: piece.replace(suffix, " ").encode()
    # WordPiece continues a word with a prefix; whole-word vocabularies never continue one.
    prefix = kinds.get("WordPiece", {}).get("prefix", "\0")
    return lambda piece: (
        piece.removeprefix(prefix) if piece.startswith(prefix) else f" {piece}"
    ).encode()
