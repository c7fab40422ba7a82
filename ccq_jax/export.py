r"""Writes a trained run as a folder that others can use.

    python -m ccq_jax.export --workdir=runs/ccq_gdn --out=DIR [--format=hf|stablehlo|orbax]
        [--dtype=bfloat16] [--step=best] [--average=5] [--weights=ema]

hf          config.json and safetensors in flash-linear-attention's names; read and written one
            parameter at a time, so that this host holds no more than one
stablehlo   prefill and decode step as compiled functions of any batch and length (ccq_jax.stablehlo)
orbax       the parameters alone, spread over this host's devices (ccq_jax.parameters)

All of them get the tokenizer, generation_config.json and a model card with the training
configuration and the evaluations' results. `python -m ccq_jax.generate --model=DIR` reads any.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from ml_collections import FrozenConfigDict

from ccq_jax import interop, stablehlo
from ccq_jax.data import make_tokenizer
from ccq_jax.data.tokenizer_files import write_tokenizer
from ccq_jax.generator import Generator
from ccq_jax.model_card import write_card
from ccq_jax.parameters import RunParameters, model_of, save_parameters

FORMATS = ("hf", "stablehlo", "orbax")
# ||x - reference|| / ||reference|| of logits, against the model that was exported; it runs by other
# implementations of the same operators.
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}


def export(
    run: RunParameters,
    out: str | Path,
    *,
    form: str = "hf",
    dtype: str = "float32",
    max_len: int = 4096,
) -> None:
    """Writes a run's parameters into a new folder.

    Args:
      run: what is exported.
      out: a folder that does not exist, or is empty. It is there once it is whole.
      form: one of FORMATS.
      dtype: of the parameters in the files, "float32" or "bfloat16".
      max_len: stablehlo of softmax attention: tokens that its cache holds.

    Raises:
      ValueError: `out` holds something, or the model cannot be written in this form.
      RuntimeError: functions that were read back do not compute what the model computes.
    """
    if form not in FORMATS:
        raise ValueError(f"format is {form!r}: it must be one of {', '.join(FORMATS)}")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype is {dtype!r}: it must be float32 or bfloat16")
    out = Path(out).expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} holds something already: name a new or an empty folder")
    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        _write(run, unfinished, form, dtype, max_len)
        unfinished.replace(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(run: RunParameters, out: Path, form: str, dtype: str, max_len: int) -> None:
    model = run.config.model
    tokenizer = make_tokenizer(run.config.data.tokenizer)
    if form == "hf":
        interop.write_hf(
            FrozenConfigDict(model), run.shapes, run.read, out, dtype=dtype,
            extra={"bos_token_id": None, "eos_token_id": tokenizer.eos_id},
        )  # fmt: skip
    elif form == "orbax":
        save_parameters(out, model, run.load(sharded=True), dtype)
    else:
        stablehlo.write_functions(out, model, dtype, max_len)
        stablehlo.write_parameters(out, run.shapes, run.read, dtype)
        _compare(run, out, dtype)
    write_tokenizer(run.config.data.tokenizer, out)
    sampling = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "max_new_tokens": 256}
    generation = {"eos_token_id": tokenizer.eos_id, "bos_token_id": None, **sampling}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    write_card(run, out, form, dtype)


def _compare(run: RunParameters, out: Path, dtype: str) -> None:
    """Reads functions back: they must give what they gave before, and what the model gives."""
    config = run.config.model
    program, params = stablehlo.load(out)
    for name, error in stablehlo.differences(config, program, params, rows=2).items():
        _accept(f"{name}, before and after", error, 1e-6)
    tokenizer = make_tokenizer(run.config.data.tokenizer)
    rounded = jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), run.load())
    model = Generator(model_of(config, rounded), tokenizer)
    exported = Generator((program, params), tokenizer)
    prompts = [list(range(n)) for n in (3, stablehlo.SEGMENT + 5)]
    states = [generator.read(prompts, room=stablehlo.SEGMENT) for generator in (model, exported)]
    a, b = (state.logits for state in states)
    error = float(jnp.linalg.norm(b - a) / jnp.linalg.norm(a))
    _accept("prefill, beside the model", error, TOLERANCE[config.dtype])


def _accept(what: str, error: float, tolerance: float) -> None:
    print(f"{what}: logits differ by {error:.1e}")
    if not error <= tolerance:
        raise RuntimeError(f"{what}: logits differ by {error:.1e}: nothing was exported")


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: see --help."""
    flags = _flags().parse_args(argv)
    try:
        run = RunParameters(
            flags.workdir, step=flags.step, average=flags.average, weights=flags.weights
        )
        export(run, flags.out, form=flags.format, dtype=flags.dtype, max_len=flags.max_len)
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"export: {error}")
    steps = ", ".join(map(str, run.steps[::-1]))
    print(f"step {steps} as {flags.format}, {flags.dtype}, in {flags.out}")


def _step_name(text: str) -> str | int:
    return text if text in ("latest", "best") else int(text)


def _flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ccq_jax.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--workdir", type=Path, required=True, help="the folder that train.py wrote")
    add("--out", type=Path, required=True, help="a new folder")
    add("--format", choices=FORMATS, default="hf", help="default: hf")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the parameters")
    add("--step", type=_step_name, default="latest", help="latest (default), best, or a step")
    add("--average", type=int, default=1, help="the mean over so many checkpoints up to that step")
    add("--weights", choices=("params", "ema"), default="params", help="ema: the running average")
    add("--max_len", type=int, default=4096, help="stablehlo of attention: tokens of its cache")
    return parser


if __name__ == "__main__":
    main()
