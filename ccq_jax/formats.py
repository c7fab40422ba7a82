"""Opens a model for generation, whatever form it lies in.

a run's workdir                  train.py; the step is chosen with `step`
a folder in Hugging Face form    ccq_jax.export, flash-linear-attention
a folder of parameters           ccq_jax.export --format=orbax
a folder of compiled functions   ccq_jax.export --format=stablehlo
"""

from pathlib import Path

from ccq_jax import checkpoint, interop, parameters, stablehlo
from ccq_jax.data import make_tokenizer
from ccq_jax.generator import Generator
from ccq_jax.workdir import read_config


def open_generator(
    directory: str | Path, *, step: int | str = "latest", tokenizer: str = ""
) -> Generator:
    """The model in `directory`, with its tokenizer, ready to generate.

    Args:
      directory: in one of the forms above.
      step: of a run's workdir: "latest", "best" or a step.
      tokenizer: as for `make_tokenizer`; "" is the one that the directory names or holds.

    Raises:
      ValueError: the directory holds no model, a damaged one, or one without a tokenizer.
      FileNotFoundError: a file of it is missing.
    """
    path = Path(directory).expanduser()
    if read_config(path) is not None:
        run = checkpoint.load_model(path, step=step)
        return Generator(run.model, make_tokenizer(tokenizer or run.config.data.tokenizer))
    if step != "latest":
        raise ValueError(f"step is {step!r}, and {path} is no run: it holds one model")
    tokens = make_tokenizer(tokenizer or str(path / _tokenizer_file(path)))
    if (path / stablehlo.MANIFEST).is_file():
        return Generator(stablehlo.load(path), tokens)
    if (path / parameters.CONFIG).is_file():
        return Generator(parameters.load_parameters(path), tokens)
    if (path / "config.json").is_file():
        return Generator(interop.load_hf(path), tokens)
    raise ValueError(
        f"{path} holds no model: it must be a run's workdir, a folder in Hugging Face form, or one "
        "that ccq_jax.export wrote"
    )


def _tokenizer_file(path: Path) -> str:
    for name in ("tokenizer.json", "tokenizer.model"):
        if (path / name).is_file():
            return name
    if not path.is_dir() or not any(path.glob("*.json")):
        raise ValueError(f"{path} holds no model")
    raise ValueError(f"{path} holds no tokenizer: name one with --tokenizer")
