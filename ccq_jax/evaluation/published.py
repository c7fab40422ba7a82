"""Figures from papers, under the paths that `ccq_jax.compare` knows ours by; copied, not measured here."""

from typing import NamedTuple


class Row(NamedTuple):
    """A model's published figures by path."""

    model: str
    source: str
    figures: dict[str, float]


_GDN = "arXiv 2412.06464, 1.3B parameters, 100B tokens of FineWeb-Edu"
_CCQ = "arXiv 2606.01294, FineWeb-Edu"

# Perplexities, and accuracies in %, in the order of the paper's columns.
_ZERO_SHOT = (
    "lm/wikitext/word_perplexity",
    "lm/lambada_openai/perplexity",
    "lm/lambada_openai/acc",
    "lm/piqa/acc",
    "lm/hellaswag/acc_norm",
    "lm/winogrande/acc",
    "lm/arc_easy/acc",
    "lm/arc_challenge/acc_norm",
    "lm/social_iqa/acc",
    "lm/boolq/acc",
    "lm/mean",
)


def _zero_shot(*values: float) -> dict[str, float]:
    return dict(zip(_ZERO_SHOT, values, strict=True))


def _niah(*tasks: tuple[float, ...]) -> dict[str, float]:
    """Accuracy of S-NIAH-1, -2 and -3 at 1K, 2K, 4K and 8K tokens; the third stops at 4K."""
    return {
        f"s_niah/{number}/{1024 << i}": value
        for number, values in enumerate(tasks, 1)
        for i, value in enumerate(values)
    }


PUBLISHED = (
    Row(
        "Transformer++ 1.3B",
        _GDN,
        _zero_shot(18.53, 18.32, 42.60, 70.02, 50.23, 53.51, 68.83, 35.10, 40.66, 57.09, 52.25)
        | {"longbench/mean": 11.0, "retrieval/mean": 37.0},
    ),
    Row(
        "Mamba2 1.3B",
        _GDN,
        _zero_shot(16.56, 12.56, 45.66, 71.87, 55.67, 55.24, 72.47, 37.88, 40.20, 60.13, 54.89)
        | _niah((99.2, 98.8, 65.4, 30.4), (99.4, 98.8, 56.2, 17.0), (64.4, 47.6, 4.6))
        | {"longbench/mean": 13.5, "retrieval/mean": 29.8},
    ),
    Row(
        "DeltaNet 1.3B",
        _GDN,
        _zero_shot(17.71, 16.88, 42.46, 70.72, 50.93, 53.35, 68.47, 35.66, 40.22, 55.29, 52.14),
    ),
    Row(
        "Gated DeltaNet 1.3B",
        _GDN,
        _zero_shot(16.42, 12.17, 46.65, 72.25, 55.76, 57.45, 71.21, 38.39, 40.63, 60.24, 55.32)
        | _niah((98.4, 88.4, 91.4, 91.8), (100.0, 99.8, 92.2, 29.6), (86.6, 84.2, 27.6))
        | {"longbench/mean": 16.6, "retrieval/mean": 30.6},
    ),
    Row(
        "CCQ-GLA 1.3B",
        _CCQ,
        {"lm/wikitext/word_perplexity": 16.92, "lm/lambada_openai/acc": 47.82},
    ),
)
