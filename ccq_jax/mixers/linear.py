"""What the linear mixers share: projections, short convolutions, CCQ, and the gated read-out."""

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from ml_collections import FrozenConfigDict

from ccq_jax.cache import LayerCache, Segments
from ccq_jax.ccq import CCQ, operator_options, step_options
from ccq_jax.layers import Linear, RMSNorm, ShortConv
from ccq_jax.sharding import batch_parallel
from kernels import CCQMoments, decode_step

Heads = Float[Array, "B T H W"]


class LinearCache(NamedTuple):
    """One layer's memory between calls; its size does not depend on how many tokens were seen."""

    tails: tuple[Array, ...]  # the last inputs of q's, k's and v's convolutions, if there are any
    statistics: CCQMoments | None  # of the keys
    state: Float[Array, "B HV K V"]


class MemoryInputs(NamedTuple):
    """What a layer's tokens write into its memory, and the queries that read it."""

    q: Heads
    k: Heads
    v: Heads
    gates: tuple[Float[Array, "B T ..."], ...]  # log_decay, and what else the recurrence takes


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

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segments: Segments,
        cache: LinearCache | None = None,
        diagnostics: bool = False,
    ) -> tuple[Float[Array, "B T D"], LinearCache | None, dict[str, Float[Array, " H"]]]:
        """See `ccq_jax.mixers`."""
        tails = () if cache is None else cache.tails
        inputs, tails = self.inputs(x, segments, tails)
        q, statistics, described = self.condition(inputs, segments, cache, diagnostics)
        state = None if cache is None else segments.carry(cache.state)
        o, state = self.recall(inputs._replace(q=q), segments, state)
        y = self.read_out(o, x)
        return y, None if cache is None else LinearCache(tails, statistics, state), described

    def step(
        self, x: Float[Array, "B 1 D"], segments: Segments, cache: LayerCache
    ) -> tuple[Float[Array, "B 1 D"], LinearCache]:
        """See `ccq_jax.mixers`. `condition` and `recall` are one, fused where there is a kernel."""
        stacked, layer = cache
        tails = LayerCache(stacked.tails, layer)
        inputs, new_tails = self.inputs(x, segments, tails.read())
        ccq: dict[str, Array | None] = {}
        if self.ccq is not None:
            q, k, _, (log_decay, *_) = inputs
            ccq = self.ccq.step(q, k, log_decay, segments, LayerCache(stacked.statistics, layer))

        def run(token, ccq, state, moments, layer):
            q, k, v, (log_decay, *beta) = token
            return decode_step(
                *(q, k, v, log_decay, state),
                beta=beta[0] if beta else None,
                moments=moments,
                layer=layer,
                centered=self.config.ccq.centered,
                **ccq,
                **step_options(self.config),
            )

        log_decay, *rest = inputs.gates
        inputs = inputs._replace(gates=(segments.forget(log_decay), *rest))
        token = jax.tree.map(lambda x: x[:, 0], inputs)
        run = batch_parallel(run, in_axes=(0, 0, 1, 1, None), out_axes=(0, 1, 1))
        o, state, moments = run(token, ccq, stacked.state, stacked.statistics, layer)
        y = self.read_out(o[:, None], x)
        return y, LinearCache(tails.write(new_tails), moments, state)

    def inputs(
        self, x: Float[Array, "B T D"], segments: Segments, tails: tuple[Array, ...] = ()
    ) -> tuple[MemoryInputs, tuple[Array, ...]]:
        """What goes to the memory, the query as CCQ finds it, and the convolutions' tails."""
        parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        new_tails: list[Array] = []
        for i, conv in enumerate(self._convs()):
            parts[i], tail = conv(parts[i], segments, tails[i] if tails else None)
            new_tails.append(tail)
        c = self.config
        shapes = [(c.num_heads, c.head_dim)] * 2 + [(c.num_v_heads, c.head_v_dim)]
        q, k, v = (y.reshape(*y.shape[:2], *s) for y, s in zip(parts, shapes, strict=True))
        return MemoryInputs(*self.activate(q, k, v), self.gates(x)), tuple(new_tails)

    def activate(self, q: Heads, k: Heads, v: Heads) -> tuple[Heads, Heads, Heads]:
        """What a mixer does to its projections."""
        return q, k, v

    @abc.abstractmethod
    def gates(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T ..."], ...]:
        """What `recurrence` takes besides q, k and v: log_decay, and more."""

    @abc.abstractmethod
    def recurrence(
        self, q: Heads, k: Heads, v: Heads, *gates: Array, **options: Any
    ) -> tuple[Heads, Float[Array, "B HV K V"]]:
        """The operator, with its `segment_ids` and `initial_state` among the options."""

    def recall(
        self,
        inputs: MemoryInputs,
        segments: Segments,
        state: Float[Array, "B HV K V"] | None = None,
    ) -> tuple[Heads, Float[Array, "B HV K V"]]:
        """What each query reads, and the memory after the last token. Linear in `inputs.v`."""

        def run(q, k, v, gates, segment_ids, state):
            options = operator_options(self.config)
            options |= {"segment_ids": segment_ids, "initial_state": state}
            return self.recurrence(q, k, v, *gates, **options)

        return batch_parallel(run)(*inputs, segments.ids, state)

    def _convs(self) -> list[ShortConv]:
        convs = (self.q_conv, self.k_conv, self.v_conv)
        return [conv for conv in convs if conv is not None]

    def condition(
        self,
        inputs: MemoryInputs,
        segments: Segments,
        cache: LinearCache | None = None,
        diagnostics: bool = False,
    ) -> tuple[Heads, CCQMoments | None, dict[str, Float[Array, " H"]]]:
        """The query that reads the memory: CCQ's, or q itself."""
        if self.ccq is None:
            return inputs.q, None, {}
        q, k, _, (log_decay, *_) = inputs
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
