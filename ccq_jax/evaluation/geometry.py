"""Does CCQ do what it claims in a model? What a query reads of a needle, and of all the rest.

An example of a recall task asks for tokens that stand earlier in it: the needle. Where the model is to
say the first of them, each head's read is the needle's contribution plus everything else's. Both are
had exactly, as reads are linear in the values: the same recurrence runs with the needle's values alone,
and with all others. CCQ claims that the contracted query lets more of the needle through than of the
rest; the ratio of the two, with the contraction and without it, says whether it does.

The claim rests on where keys lie: needles apart from the crowd, outside the directions that most keys
share. `needle_share` and `other_share` are how much of a key lies in the leading eigenvectors of the
keys' covariance (the paper's diagnostic, arXiv 2606.01294).
"""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree

from ccq_jax.cache import Segments, locate
from ccq_jax.evaluation.statistics import Examples
from ccq_jax.model import LanguageModel

TOP = 16
"""Leading eigenvectors of the covariance that count as the crowd's; K / 4 where K is below 64."""
BUCKETS = 16
"""Pieces of the context over which lambda is averaged."""
TINY = float(jnp.finfo(jnp.float32).tiny)

Batch = dict[str, np.ndarray]


def find_needle(
    inputs: Int[np.ndarray, " T"], targets: Int[np.ndarray, " T"], answers: Bool[np.ndarray, " T"]
) -> tuple[int, int, int]:
    """Where the last answer of an example is asked for, and where its tokens stand before.

    Returns:
      (read, start, stop): the position that predicts the answer's first token, and the needle's
      positions, the token in front of the answer included: it is what a key may be made of.

    Raises:
      ValueError: the answer does not occur in the example before it is asked for.
    """
    asked = np.flatnonzero(answers)
    last = asked[-1]
    read = last
    while read - 1 in asked:
        read -= 1
    answer = targets[read : last + 1]
    for start in range(1, read - len(answer) + 1):
        if (inputs[start : start + len(answer)] == answer).all():
            return int(read), start - 1, start + len(answer)
    raise ValueError(f"the answer {answer.tolist()} does not occur before position {read}")


def measure(
    model: LanguageModel, batches: Iterable[Batch]
) -> tuple[dict[str, Any], dict[str, Examples]]:
    """Measures the reads of needles by layer and head: means over the examples, of ratios medians.

    Args:
      model: with CCQ or without; then the contraction is that of lambda 0, none.
      batches: as `make_recall_batch` makes them, of one length.

    Returns:
      (results, examples): nested lists [layer][head ...] of
        `snr`, `plain_snr`: 10 log10 of needle over rest, energies of the read with CCQ's query and
          with the query as the layer makes it (dB);
        `gain`: their difference, averaged over the examples;
        `lambda`: over BUCKETS pieces of the context, up to the read; absent without CCQ;
        `spectrum`: Sigma's eigenvalues at the read, the largest first;
        `needle_share`, `other_share`: how much of |k|^2 lies in the `top` leading eigenvectors, for
          the needle's keys and for all others before the read;
      and for each example the means over all layers and heads of `gain`, and of `needle_share` less
      `other_share` as `share_gap`, whose own means are among the results under the same names.
    """
    graph, params = nnx.split(model)
    found: list[dict[str, np.ndarray]] = []
    for batch in batches:
        places = [
            find_needle(*row)
            for row in zip(batch["inputs"], batch["targets"], batch["loss_mask"], strict=True)
        ]
        read, start, stop = np.array(places).T
        at = np.arange(batch["inputs"].shape[1])
        needle = (at >= start[:, None]) & (at < stop[:, None])
        arguments = batch["inputs"], batch["segment_ids"], needle, read
        found.append(jax.device_get(_measure(graph, params, *arguments)))
    # Each [L, B, heads, ...]; examples of all batches together.
    every = {
        name: np.concatenate([part[name] for part in found], axis=1, dtype=np.float64)
        for name in found[0]
    }
    every["gain"] = every["snr"] - every["plain_snr"]
    # Of ratios the median: a head that has forgotten some needles has ratios near 0 (-380 dB).
    middle = {name: np.median if name.endswith("snr") else np.mean for name in every}
    results: dict[str, Any] = {name: middle[name](x, axis=1).tolist() for name, x in every.items()}
    gaps = every["needle_share"] - every["other_share"]
    by_example = {"mean_gain": every["gain"], "share_gap": gaps}
    means = {name: x.mean(axis=(0, 2)) for name, x in by_example.items()}
    results |= {name: float(x.mean()) for name, x in means.items()}
    results |= {"examples": every["gain"].shape[1], "top": top(every["spectrum"].shape[-1])}
    return results, {name: Examples(x, np.ones_like(x)) for name, x in means.items()}


def top(width: int) -> int:
    """The number of leading eigenvectors of keys of a width."""
    return min(TOP, max(1, width // 4))


@functools.partial(jax.jit, static_argnums=0)
def _measure(
    graph: nnx.GraphDef,
    params: PyTree,
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    needle: Bool[Array, "B T"],
    read: Int[Array, " B"],
) -> dict[str, Float[Array, "L B H ..."]]:
    model = nnx.merge(graph, params)
    segments = locate(segment_ids, None, tokens.shape[1])
    layers, stacked = nnx.split(model.layers)

    def layer(x, params):
        block = nnx.merge(layers, params)
        seen = block.mixer_norm(x)
        described = _describe(block.mixer, seen, segments, needle, read)
        x = x + block.mixer(seen, segments)[0]
        return x + block.mlp(block.mlp_norm(x)), described

    return jax.lax.scan(layer, model.embed(tokens), stacked)[1]


def _describe(
    mixer: Any,
    x: Float[Array, "B T D"],
    segments: Segments,
    needle: Bool[Array, "B T"],
    read: Int[Array, " B"],
) -> dict[str, Float[Array, "B H ..."]]:
    inputs, _ = mixer.inputs(x, segments)
    described = {"plain_snr": _needle_to_rest(mixer, inputs, segments, needle, read)}
    described["snr"] = described["plain_snr"]
    ccq = getattr(mixer, "ccq", None)
    if ccq is not None:
        q, _, _ = mixer.condition(inputs, segments)
        described["snr"] = _needle_to_rest(mixer, inputs._replace(q=q), segments, needle, read)
        described["lambda"] = _over_context(ccq.strength(inputs.q), read)
    return described | _shares(inputs.k, needle, _before(read, needle.shape[1]))


def _needle_to_rest(mixer: Any, inputs, segments, needle, read) -> Float[Array, "B H"]:
    """Energy of the needle's part of the read over the rest's, in dB."""

    def energy(written: Bool[Array, "B T"]) -> Float[Array, "B H"]:
        values = jnp.where(written[..., None, None], inputs.v, 0)
        o, _ = mixer.recall(inputs._replace(v=values), segments)
        return jnp.sum(_at(o, read).astype(jnp.float32) ** 2, axis=-1) + TINY

    return 10 * (jnp.log10(energy(needle)) - jnp.log10(energy(~needle)))


def _shares(
    k: Float[Array, "B T H K"], needle: Bool[Array, "B T"], before: Bool[Array, "B T"]
) -> dict[str, Float[Array, "B H ..."]]:
    """Eigenvalues of the keys' covariance, and what share of keys its leading vectors hold."""
    k = k.astype(jnp.float32)
    mean = _mean(k, before)
    centred = jnp.where(before[..., None, None], k - mean[:, None], 0)
    count = before.sum(axis=1).astype(jnp.float32)[:, None, None, None]
    sigma = jnp.einsum("bthi,bthj->bhij", centred, centred, precision="highest") / count
    values, vectors = jnp.linalg.eigh(sigma)
    leading = vectors[..., -top(k.shape[-1]) :]
    inside = jnp.einsum("bthk,bhkn->bthn", k, leading, precision="highest")
    share = jnp.sum(inside**2, axis=-1) / (jnp.sum(k**2, axis=-1) + TINY)
    return {
        "spectrum": values[..., ::-1],
        "needle_share": _mean(share, before & needle),
        "other_share": _mean(share, before & ~needle),
    }


def _mean(x: Float[Array, "B T ..."], where: Bool[Array, "B T"]) -> Float[Array, "B ..."]:
    where = where.reshape(*where.shape, *[1] * (x.ndim - 2))
    return jnp.mean(x, axis=1, where=where)


def _over_context(lam: Float[Array, "B T H"], read: Int[Array, " B"]) -> Float[Array, "B H n"]:
    """Means over BUCKETS equal pieces of each row up to its read."""
    at = jnp.arange(lam.shape[1])
    bucket = at * BUCKETS // (read[:, None] + 1)
    pieces = [_mean(lam, bucket == i) for i in range(BUCKETS)]
    return jnp.stack(pieces, axis=-1)


def _before(read: Int[Array, " B"], length: int) -> Bool[Array, "B T"]:
    return jnp.arange(length) <= read[:, None]


def _at(x: Float[Array, "B T ..."], position: Int[Array, " B"]) -> Float[Array, "B ..."]:
    return x[jnp.arange(x.shape[0]), position]
