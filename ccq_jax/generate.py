r"""Streams text from a trained model, token by token, out of a state of constant size.

    python -m ccq_jax.generate --model=runs/ccq_gdn --prompt='def ' --temperature=0.8 --top_p=0.95
    python -m ccq_jax.generate --model=EXPORTED --prompt='def ' --prompt='class '
    python -m ccq_jax.generate --model=runs/ccq_gdn --prompt_file=long.txt --save_state=long.state --max_tokens=0
    python -m ccq_jax.generate --model=runs/ccq_gdn --state=long.state --prompt='and so '

The model is a run's workdir, a folder in Hugging Face form, or what ccq_jax.export wrote. Several
prompts are a batch; their texts are printed one after the other when all have ended. Speeds are
printed at the end, to stderr. In Python: ccq_jax.generator.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ccq_jax.formats import open_generator
from ccq_jax.generator import Generator
from ccq_jax.sampling import Sampling
from ccq_jax.state import State


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: see --help."""
    flags = _flags().parse_args(argv)
    try:
        _run(flags)
    except (ValueError, OSError) as error:
        sys.exit(f"generate: {error}")


def _run(flags: argparse.Namespace) -> None:
    sampling = Sampling(flags.temperature, flags.top_k, flags.top_p)
    prompts = list(flags.prompt or [])
    if flags.prompt_file is not None:
        prompts.append(flags.prompt_file.read_text())
    prompts = prompts or [""]
    generator = open_generator(flags.model, step=flags.step, tokenizer=flags.tokenizer)
    state = None if flags.state is None else generator.load(flags.state)
    if flags.save_state is not None:
        state = generator.read(prompts, state=state, room=flags.max_tokens)
        generator.save(state, flags.save_state)
        print(f"state of {state.tokens.tolist()} tokens in {flags.save_state}", file=sys.stderr)
        if flags.max_tokens == 0:
            return
        _print_texts(generator, flags, sampling, state, prompts, [""] * len(prompts))
    else:
        _print_texts(generator, flags, sampling, state, prompts, prompts)


def _print_texts(
    generator: Generator,
    flags: argparse.Namespace,
    sampling: Sampling,
    state: State | None,
    shown: list[str],
    prompts: list[str],
) -> None:
    stream = generator.stream(
        prompts,
        max_tokens=flags.max_tokens,
        sampling=sampling,
        seed=flags.seed,
        state=state,
        stop=flags.stop or (),
    )
    if len(prompts) == 1:
        sys.stdout.write(shown[0])
        for (piece,) in stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
    else:
        for _ in stream:
            pass
        for number, (prompt, row) in enumerate(zip(shown, stream.rows, strict=True), 1):
            print(f"--- {number}\n{prompt}{row.text}")
    print(f"[{stream.speed()}; compilation included]", file=sys.stderr)


def _step_name(text: str) -> str | int:
    return text if text in ("latest", "best") else int(text)


def _flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ccq_jax.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", "--workdir", type=Path, required=True, help="a run, or an exported folder")
    add("--step", type=_step_name, default="latest", help="of a run: latest, best, or a step")
    add("--tokenizer", default="", help="bytes, mistral or a file; default: the model's own")
    add("--prompt", action="append", help="the text to continue; give it again for a batch")
    add("--prompt_file", type=Path, help="a file with one more prompt")
    add("--state", type=Path, help="continue what --save_state wrote")
    add("--save_state", type=Path, help="write the state after the prompts")
    add("--max_tokens", type=int, default=256, help="stop after this many tokens (default 256)")
    add("--stop", action="append", help="a text ends before this string; may be repeated")
    add("--temperature", type=float, default=0.8, help="0 is greedy (default 0.8)")
    add("--top_k", type=int, default=0, help="draw from the k likeliest tokens; 0: from all")
    add("--top_p", type=float, default=0.95, help="draw from the likeliest with this probability")
    add("--seed", type=int, default=0, help="the same seed gives the same text")
    return parser


if __name__ == "__main__":
    main()
