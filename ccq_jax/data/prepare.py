"""Tokenises text into ArrayRecord shards that `data.source = arrayrecord:...` reads.

python -m ccq_jax.data.prepare --source='text:corpus/*.jsonl.zst' --tokenizer=mistral --out=DIR
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ccq_jax.data.arrayrecord import write_shards
from ccq_jax.data.documents import tokenised
from ccq_jax.data.sources import parse_source, text_files
from ccq_jax.data.tokenizer import make_tokenizer


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command; a problem ends it with one line that names it."""
    parser = argparse.ArgumentParser(prog="python -m ccq_jax.data.prepare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--source", required=True, help="text:GLOB or stdlib")
    parser.add_argument("--tokenizer", default="mistral", help="bytes, mistral, or a file's path")
    parser.add_argument("--out", required=True, type=Path, help="folder to write; made if need be")
    parser.add_argument("--name", default="tokens", help="shards are NAME-00000.arrayrecord and on")
    parser.add_argument("--shard_tokens", type=int, default=100_000_000, help="tokens of a shard")
    options = parser.parse_args(arguments)
    try:
        sources = parse_source(options.source, "--source")
        if len(sources) > 1 or sources[0].kind not in ("text", "stdlib"):
            raise ValueError(f"--source={options.source!r} must be text:GLOB or stdlib, and one")
        tokenizer = make_tokenizer(options.tokenizer)
        documents = tokenised(sources[0], text_files(sources[0]), tokenizer)
        shards = write_shards(
            (ids for ids, _ in documents),
            options.out,
            tokenizer,
            name=options.name,
            shard_tokens=options.shard_tokens,
        )
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"{shards} shards in {options.out}; read them with")
    print(f"  --config.data.source='arrayrecord:{options.out}/{options.name}-*.arrayrecord'")


if __name__ == "__main__":
    main()
