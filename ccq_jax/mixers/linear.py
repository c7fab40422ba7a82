"""What the linear mixers share: projections, short convolutions, CCQ, and the gated read-out."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from ml_collections import FrozenConfigDict

from ccq_jax.cache import Segments
from ccq_jax.ccq import CCQ
from ccq_jax.layers import Linear, RMSNorm, ShortConv
from kernels import CCQState

Heads = Float[Array, "B T H W"]


class LinearCache(NamedTuple):
    """One layer's memory between calls; its size does not depend on how many tokens were seen."""

    tails: tuple[Array, ...]  # the last inputs of q's, k's and v's convolutions, if there are any
    statistics: CCQState | None  # of the keys
    state: Float[Array, "B HV K V"]


class LinearMixer(nnx.Module):
    """Base of the linear mixers. A subclass adds its gates and its recurrence."""

    def __init__(self, config: FrozenConfigDict, *, rngs: nnx.Rngs):
        self.config = config
        hidden, norm_width = config.hidden_size, config.head_v_dim
        keys, values = config.num_heads * config.head_dim, config.num_v_heads * config.head_v_dim
        self.q_proj = Linear(config, hidden, keys, rngs=rngs)
        self.k_proj = Linear(config, hidden, keys, rngs=rngs)
        self.v_proj = Linear(config, hidden, values, rngs=rngs)
        conv = (
            (lambda size: ShortConv(config, size, rngs=rngs))
            if config.conv_size
            else lambda _: None
        )
        self.q_conv, self.k_conv, self.v_conv = conv(keys), conv(keys), conv(values)
        uses_ccq = config.ccq.enabled or config.ccq.fixed_lambda >= 0
        self.ccq = CCQ(config, rngs=rngs) if uses_ccq else None
        self.g_proj = Linear(config, hidden, values, rngs=rngs) if config.use_gate else None
        self.o_norm = RMSNorm(config, norm_width)
        self.o_proj = Linear(config, values, hidden, rngs=rngs)

    def project(
        self, x: Float[Array, "B T D"], segments: Segments, cache: LinearCache | None
    ) -> tuple[Heads, Heads, Heads, tuple[Array, ...]]:
        """q, k, v by head, after their convolutions, and the convolutions' tails."""
        parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        tails: list[Array] = []
        for i, conv in enumerate(self._convs()):
            tail = None if cache is None else cache.tails[i]
            parts[i], tail = conv(parts[i], segments, tail)
            tails.append(tail)
        c = self.config
        shapes = [(c.num_heads, c.head_dim)] * 2 + [(c.num_v_heads, c.head_v_dim)]
        q, k, v = (y.reshape(*y.shape[:2], *s) for y, s in zip(parts, shapes, strict=True))
        return q, k, v, tuple(tails)

    def _convs(self) -> list[ShortConv]:
        convs = (self.q_conv, self.k_conv, self.v_conv)
        return [conv for conv in convs if conv is not None]

    def condition(
        self,
        q: Heads,
        k: Heads,
        log_decay: Float[Array, "B T H"] | None,
        segments: Segments,
        cache: LinearCache | None,
        diagnostics: bool,
    ) -> tuple[Heads, CCQState | None, dict[str, Float[Array, " H"]]]:
        """The query that reads the memory: CCQ's, or q itself."""
        if self.ccq is None:
            return q, None, {}
        statistics = None if cache is None else cache.statistics
        return self.ccq(q, k, log_decay, segments, statistics, diagnostics)

    def read_out(self, o: Heads, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Normalises each head's read, gates it, and mixes the heads."""
        gate = None if self.g_proj is None else self.g_proj(x).reshape(o.shape)
        o = self.o_norm(o, gate)
        return self.o_proj(o.reshape(*o.shape[:2], -1))

    def init_cache(self, batch_size: int, max_len: int) -> LinearCache:
        """The memory before the first token. `max_len` changes nothing here."""
        del max_len
        c = self.config
        return LinearCache(
            tails=tuple(conv.init_cache(batch_size) for conv in self._convs()),
            statistics=None if self.ccq is None else self.ccq.init_cache(batch_size),
            state=jnp.zeros((batch_size, c.num_v_heads, c.head_dim, c.head_v_dim), jnp.float32),
        )
