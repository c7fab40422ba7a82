"""How sure a figure is, and whether two models differ: intervals and paired tests."""

import warnings
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import stats

LEVEL = 0.95
RESAMPLES = 9999
FEW = 20
"""Below as many examples a bootstrap's intervals are too narrow: Student's are taken."""


class Examples(NamedTuple):
    """What a figure is the mean of, example by example in a fixed order.

    Attributes:
      values: 0 or 1 for accuracies, losses in nats a target, and the like.
      weights: what each counts, such as its number of targets; positive.
    """

    values: Float[np.ndarray, " n"]
    weights: Float[np.ndarray, " n"]

    @classmethod
    def read(cls, found: dict[str, list[float]]) -> "Examples":
        """From the JSON object {"values": [...], "weights": [...]}; weights may be absent.

        Raises:
          ValueError: no values, not as many weights, or weights that are not positive.
        """
        values = np.asarray(found["values"], np.float64)
        weights = np.asarray(found.get("weights", np.ones(len(values))), np.float64)
        if values.ndim != 1 or not len(values) or weights.shape != values.shape:
            raise ValueError(f"examples have {values.shape} values and {weights.shape} weights")
        if not (weights > 0).all():
            raise ValueError("examples have weights that are not positive")
        return cls(values, weights)

    @property
    def mean(self) -> float:
        """The figure itself."""
        return float(_weighted_mean(self.values, self.weights))


class Interval(NamedTuple):
    """Ends of a confidence interval."""

    low: float
    high: float


class Difference(NamedTuple):
    """How a second model differs from a first on the same examples.

    Attributes:
      mean: the second's figure less the first's.
      interval: of `mean`.
      p: of the hypothesis that it is chance which of the two has the larger value of an example.
    """

    mean: float
    interval: Interval
    p: float


def interval(examples: Examples, seed: int = 0) -> Interval:
    """The confidence interval of the mean.

    Clopper and Pearson's of shares; else of few examples of one weight Student's, or bootstrap (BCa).
    """
    values, weights = examples
    for whole in (1, 100):  # right answers, and right answers in %
        if np.isin(values, (0, whole)).all() and (weights == weights[0]).all():
            test = stats.binomtest(int((values > 0).sum()), len(values))
            low, high = test.proportion_ci(LEVEL, method="exact")
            return Interval(whole * float(low), whole * float(high))
    return _interval(values, weights, seed)


def difference(first: Examples, second: Examples, seed: int = 0) -> Difference:
    """Compares two models on the same examples, pair by pair.

    The interval is Student's of few examples and else a bootstrap; p is that of the paired permutation
    test, which flips the sign of an example's difference at random.

    Raises:
      ValueError: not the same examples, as far as their number and weights tell.
    """
    if first.values.shape != second.values.shape or (first.weights != second.weights).any():
        raise ValueError("the two models were not measured on the same examples")
    weights = first.weights
    gaps = second.values - first.values
    mean = float(_weighted_mean(gaps, weights))
    if not gaps.any():
        return Difference(mean, Interval(0.0, 0.0), 1.0)
    test = stats.permutation_test(
        (gaps * weights,),
        lambda x, axis: x.sum(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=RESAMPLES,
        rng=np.random.default_rng(seed),
    )
    return Difference(mean, _interval(gaps, weights, seed), float(test.pvalue))


def false_discovery(p: list[float]) -> list[float]:
    """Benjamini and Hochberg's q of each p: the share of false finds among those as small."""
    return [float(q) for q in stats.false_discovery_control(p)] if p else []


def _weighted_mean(values: np.ndarray, weights: np.ndarray, axis: int = -1) -> np.ndarray:
    return (values * weights).sum(axis=axis) / weights.sum(axis=axis)


def _interval(values: np.ndarray, weights: np.ndarray, seed: int) -> Interval:
    if len(values) < 2:
        return Interval(float("-inf"), float("inf"))
    if len(values) < FEW and (weights == weights[0]).all():
        half = stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * stats.sem(values)
        return Interval(float(values.mean() - half), float(values.mean() + half))
    return _bootstrap(values, weights, seed)


def _bootstrap(values: np.ndarray, weights: np.ndarray, seed: int) -> Interval:
    arguments = {
        "statistic": _weighted_mean,
        "paired": True,
        "vectorized": True,
        "confidence_level": LEVEL,
        "n_resamples": RESAMPLES,
    }
    with warnings.catch_warnings():
        # BCa has no answer where nearly all values agree; percentiles have.
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        for method in ("BCa", "percentile"):
            found = stats.bootstrap(
                (values, weights), method=method, rng=np.random.default_rng(seed), **arguments
            ).confidence_interval
            if np.isfinite(found).all():
                break
    return Interval(float(found.low), float(found.high))
