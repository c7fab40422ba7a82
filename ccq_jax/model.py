"""The language model: embedding, L blocks under one scan, norm, head."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict, FrozenConfigDict

from ccq_jax.cache import Cache, LayerCache, Segments, advance, empty_cache, locate
from ccq_jax.config import resolve_model, validate_model
from ccq_jax.layers import Embed, Linear, RMSNorm, SwiGLU
from ccq_jax.mixers import MIXERS
from ccq_jax.sharding import shard_batch


class Features(NamedTuple):
    """What the model computes before its head."""

    hidden: Float[Array, "B T D"]  # after the final norm
    cache: Any  # the Cache after the last token, if one was given; else None
    diagnostics: dict[str, Float[Array, "L H"]]  # see ccq_jax.ccq.diagnose; empty if not asked for


class Block(nnx.Module):
    """x + mixer(norm x), then x + mlp(norm x)."""

    def __init__(self, config: FrozenConfigDict, *, rngs: nnx.Rngs):
        self.mixer_norm = RMSNorm(config, config.hidden_size)
        self.mixer = MIXERS[config.mixer](config, rngs=rngs)
        self.mlp_norm = RMSNorm(config, config.hidden_size)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], segments: Segments, cache: Any, diagnostics: bool):
        """Returns x, the mixer's cache, its diagnostics."""
        y, cache, described = self.mixer(self.mixer_norm(x), segments, cache, diagnostics)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), cache, described

    def step(self, x: Float[Array, "B 1 D"], segments: Segments, cache: LayerCache):
        """The same for one token: returns x, and the mixers' caches, stacked over layers."""
        y, stacked = self.mixer.step(self.mixer_norm(x), segments, cache)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), stacked


class LanguageModel(nnx.Module):
    """Next-token logits from tokens.

    Parameters are float32. Those of the blocks are stacked over layers, as in
    `model.layers.mixer.q_proj.kernel` [L, D, H K], so that one compiled block serves every layer.
    Matrices are stored [in, out] and named `kernel` (`embedding` in the embedding).

    Args:
      config: `config.model`, with a vocabulary size; see `ccq_jax.config`.
      rngs: the stream `params` initialises the parameters.

    Raises:
      ValueError: naming the fields of `config` that do not fit.
    """

    def __init__(self, config: ConfigDict, *, rngs: nnx.Rngs):
        validate_model(config)
        if config.vocab_size == 0:
            raise ValueError(
                "model.vocab_size is 0: it must be the tokenizer's size; see ccq_jax.config.resolve"
            )
        frozen = FrozenConfigDict(resolve_model(config))
        self.config = frozen
        self.embed = Embed(frozen, rngs=rngs)

        @nnx.split_rngs(splits=frozen.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(frozen, rngs=rngs)

        self.layers = stack(rngs)
        self.norm = RMSNorm(frozen, frozen.hidden_size)
        sizes = (frozen.hidden_size, frozen.vocab_size)
        tied = frozen.tie_embeddings
        self.lm_head = None if tied else Linear(frozen, *sizes, rngs=rngs, out_dtype="float32")

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        *,
        cache: Cache | None = None,
    ) -> Float[Array, "B T vocab"]:
        """Logits, float32; arguments as for `features`."""
        return self.logits(self.features(tokens, segment_ids, cache).hidden)

    def features(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        cache: Cache | None = None,
        *,
        diagnostics: bool = False,
    ) -> Features:
        """Everything but the head.

        Args:
          tokens: ids in [0, vocab_size); another id gives NaN.
          segment_ids: nothing passes between runs of tokens of different id (documents, padding).
            None: the tokens are one segment, and with a cache they continue its last one.
          cache: the state of the tokens before these; see `init_cache`.
          diagnostics: also compute CCQ's diagnostics.

        Raises:
          ValueError: tokens or segment ids that are not integers [B, T].
        """
        _check("tokens", tokens, None)
        if segment_ids is not None:
            _check("segment_ids", segment_ids, tokens.shape)
        segments = locate(segment_ids, cache, tokens.shape[1])
        x = shard_batch(self.embed(tokens))
        caches = None if cache is None else cache.layers
        described: dict[str, Array] = {}
        with self._precision():
            if cache is not None and tokens.shape[1] == 1 and not diagnostics:
                x, caches = self._step_layers(x, segments, caches)
            else:
                x, caches, described = self._run_layers(x, segments, caches, diagnostics)
        if cache is not None:
            cache = advance(cache, caches, segments)
        return Features(self.norm(x), cache, described)

    def _run_layers(
        self, x: Float[Array, "B T D"], segments: Segments, caches: Any, describe: bool
    ):
        """Returns x, the mixers' caches and diagnostics."""
        graph, params = nnx.split(self.layers)

        def layer(x, inputs):
            block = nnx.merge(graph, inputs[0])
            x, cache, described = block(x, segments, inputs[1], describe)
            return shard_batch(x), (cache, described)

        layer = rematerialise(layer, self.config.remat)
        x, (caches, described) = jax.lax.scan(layer, x, (params, caches))
        return x, caches, described

    def _step_layers(self, x: Float[Array, "B 1 D"], segments: Segments, caches: Any):
        """Returns x and the mixers' caches, which no layer cuts out of the others'."""
        graph, params = nnx.split(self.layers)

        def layer(carry, inputs):
            x, caches = carry
            block = nnx.merge(graph, inputs[0])
            x, caches = block.step(x, segments, LayerCache(caches, inputs[1]))
            return (shard_batch(x), caches), None

        layers = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        (x, caches), _ = jax.lax.scan(layer, (x, caches), (params, layers))
        return x, caches

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch vocab"]:
        """The head: float32 logits of what `features` returned."""
        with self._precision():
            return self.embed.attend(hidden) if self.lm_head is None else self.lm_head(hidden)

    def _precision(self):
        """float32 compute means float32, also where matrix units would round it to fewer bits."""
        return jax.default_matmul_precision("highest" if self.config.dtype == "float32" else None)

    def init_cache(self, batch_size: int, max_len: int) -> Cache:
        """The state before the first token.

        Args:
          batch_size: sequences.
          max_len: tokens that attention can hold, padding included; linear mixers have no limit.
        """
        layer = jax.eval_shape(lambda: self.layers.mixer.init_cache(batch_size, max_len))
        num_layers = self.config.num_layers
        stacked = jax.tree.map(lambda x: jnp.zeros((num_layers, *x.shape), x.dtype), layer)
        return empty_cache(stacked, batch_size)

    def prefill(
        self, tokens: Int[Array, "B T"], cache: Cache, segment_ids: Int[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B vocab"], Cache]:
        """Reads a prompt, or a piece of one: the last token's logits, and the state after it.

        Prompts of different lengths are padded on the left, with another segment id on the padding.
        """
        out = self.features(tokens, segment_ids, cache)
        return self.logits(out.hidden[:, -1]), out.cache

    def step(self, tokens: Int[Array, " B"], cache: Cache) -> tuple[Float[Array, "B vocab"], Cache]:
        """Reads one token a sequence: its logits, and the state after it."""
        return self.prefill(tokens[:, None], cache)


def rematerialise(layer, remat: str):
    """The layer, whose backward computes again "none", "dots" (all but matmuls) or "full"."""
    if remat == "none":
        return layer
    policies = jax.checkpoint_policies
    policy = (
        policies.dots_with_no_batch_dims_saveable if remat == "dots" else policies.nothing_saveable
    )
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def _check(name: str, x: Any, shape: tuple[int, ...] | None) -> None:
    want = "[B, T]" if shape is None else str(list(shape))
    fits = x.ndim == 2 if shape is None else x.shape == shape
    if not fits or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} is {x.dtype}{list(x.shape)}: it must be integers {want}")
