"""The README.md of an exported model: what it is, how it was trained, what it was measured at."""

import json
import math
from pathlib import Path
from typing import Any

from ccq_jax import metrics
from ccq_jax.checkpoint import versions
from ccq_jax.parameters import RunParameters

_NAMES = {
    "gated_deltanet": "Gated DeltaNet",
    "gla": "Gated linear attention",
    "attention": "Transformer",
}


def write_card(run: RunParameters, directory: Path, form: str, dtype: str) -> None:
    """Writes README.md, from a run's configuration, its metrics and its evaluations."""
    config = run.config
    name = _NAMES[config.model.mixer] + (" with CCQ" if config.model.ccq.enabled else "")
    count = sum(math.prod(shape) for shape in run.shapes.values())
    sections = [
        _front_matter(config.model),
        f"# {name}, {_round(count)} parameters",
        _about(run, count, dtype),
        "## Use\n\n" + _use(form, config.model.ccq.enabled),
        "## Evaluation\n\n" + _evaluation(run),
        "## Training configuration\n\n```json\n" + json.dumps(config.to_dict(), indent=2) + "\n```",
        "Written with " + ", ".join(f"{k} {v}" for k, v in versions().items()) + ".",
    ]
    (directory / "README.md").write_text("\n\n".join(sections) + "\n")


def _front_matter(model: Any) -> str:
    tags = ["linear-attention", model.mixer.replace("_", "-")]
    if model.mixer == "attention":
        tags = ["transformer"]
    if model.ccq.enabled:
        tags.append("ccq")
    lines = ["---", "library_name: ccq_jax", "pipeline_tag: text-generation", "tags:"]
    return "\n".join([*lines, *(f"- {tag}" for tag in tags), "---"])


def _about(run: RunParameters, count: int, dtype: str) -> str:
    model, train = run.config.model, run.config.train
    tokens = run.steps[0] * train.batch_size * train.seq_len
    said = (
        f"{model.num_layers} layers of width {model.hidden_size}, {model.num_heads} heads (keys "
        f"{model.head_dim}, values {model.head_v_dim}), vocabulary {model.vocab_size}; {count:,} "
        f"parameters, here in {dtype}. Trained to step {run.steps[0]:,}, {tokens:,} tokens of "
        f"`{run.config.data.source}` in contexts of {train.seq_len:,}, with the tokenizer "
        f"`{Path(run.config.data.tokenizer).name}`."
    )
    if run.weights == "ema":
        said += f" The parameters are their running average, of decay {train.ema}."
    if len(run.steps) > 1:
        said += f" The parameters are the mean over steps {', '.join(map(str, run.steps[::-1]))}."
    if model.ccq.enabled:
        said += (
            " CCQ conditions each query on the covariance of the keys that came before it "
            "([arXiv 2606.01294](https://arxiv.org/abs/2606.01294))."
        )
    return said


def _use(form: str, ccq: bool) -> str:
    command = "    python -m ccq_jax.generate --model=DIR --prompt='...'\n\nDIR is this folder."
    if form != "hf":
        return command
    more = (
        " In Python, `ccq_jax.interop.load_hf(DIR)`; in plain PyTorch, without kernels, "
        "`python -m ccq_jax.torch_reference DIR`."
    )
    if ccq:
        return command + more + (
            " The names are those of flash-linear-attention, to which `lambda_proj` of each layer "
            'and the object "ccq" of config.json are added; it has no CCQ and ignores them.'
        )  # fmt: skip
    return command + more + " flash-linear-attention loads it as its own."


def _evaluation(run: RunParameters) -> str:
    rows = []
    for line in metrics.read(run.path):
        if line["step"] == run.steps[0] and "eval/loss" in line:
            rows.append(("validation loss in training, nats/token", f"{line['eval/loss']:.4f}"))
            rows.append(("bits per byte", f"{line['eval/bits_per_byte']:.4f}"))
            rows.append(
                ("loss of a unigram model of the same data", f"{line['eval/unigram_loss']:.4f}")
            )
    for path in sorted((run.path / "eval").glob("*.json")):
        found = json.loads(path.read_text())
        if isinstance(found, dict) and found.get("step") == run.steps[0]:
            rows += _figures(path.stem, found.get("results", {}))
    if not rows:
        return f"No results for step {run.steps[0]}."
    note = ""
    if len(run.steps) > 1 or run.weights == "ema":
        note = f"Of the parameters of step {run.steps[0]}, not of their average:\n\n"
    return note + "\n".join(["| | |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)])


def _figures(part: str, results: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Every number in an evaluation's results, by its path in the file."""
    rows: list[tuple[str, str]] = []
    for name, value in results.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            rows += _figures(part, value, f"{path}, ")
        elif isinstance(value, list) and value and all(isinstance(x, int | float) for x in value):
            rows.append((f"{part}: {path}", ", ".join(f"{x:.4g}" for x in value)))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            rows.append(
                (f"{part}: {path}", f"{value:.4g}" if isinstance(value, float) else f"{value:,}")
            )
    return rows


def _round(count: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
