"""Writes a tokeniser as the files that Hugging Face folders hold, and that `make_tokenizer` reads."""

import importlib.resources
import json
import shutil
from pathlib import Path
from typing import Any

from ccq_jax.data.tokenizer import _byte_level_alphabet, make_tokenizer

_EOS = "<|endoftext|>"


def write_tokenizer(name: str, directory: Path) -> None:
    """Writes tokenizer.json or tokenizer.model, and tokenizer_config.json, into a folder.

    The ids stay what they are. Raises ValueError for a name that `make_tokenizer` refuses.
    """
    make_tokenizer(name)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if name == "bytes":
        (directory / "tokenizer.json").write_text(json.dumps(_bytes(), indent=1) + "\n")
        settings["eos_token"] = _EOS
    elif name == "mistral":
        files = importlib.resources.files("mistral_common")
        with importlib.resources.as_file(files / "data" / "tokenizer.model.v1") as path:
            settings = _copy_sentencepiece(path, directory)
    else:
        path = Path(name).expanduser()
        if path.is_dir():
            found = (path / f for f in ("tokenizer.json", "tokenizer.model"))
            path = next(file for file in found if file.is_file())
        beside = path.with_name("tokenizer_config.json")
        if path.read_bytes()[:64].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            shutil.copyfile(path, directory / "tokenizer.json")
        else:
            settings = _copy_sentencepiece(path, directory)
        if beside.is_file():
            settings = json.loads(beside.read_bytes())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _copy_sentencepiece(path: Path, directory: Path) -> dict[str, Any]:
    import sentencepiece

    shutil.copyfile(path, directory / "tokenizer.model")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return {
        "tokenizer_class": "LlamaTokenizer",
        "eos_token": processor.id_to_piece(processor.eos_id()),
        "add_bos_token": False,
        "add_eos_token": False,
    }


def _bytes() -> dict[str, Any]:
    """The byte tokeniser as a byte-level BPE without merges."""
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    end = {"id": 256, "content": _EOS, "special": True, "normalized": False}
    end |= {"single_word": False, "lstrip": False, "rstrip": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": _byte_level_alphabet(), "merges": []},
    }
