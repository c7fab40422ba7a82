"""The parts that every model is made of. Parameters are float32; matrices multiply in `dtype`."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from ml_collections import FrozenConfigDict

from ccq_jax.cache import Segments


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> nnx.Param:
    """A parameter drawn from N(0, std^2)."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))


class Linear(nnx.Module):
    """y = x kernel (+ bias), of dtype `out_dtype`, which defaults to the compute dtype."""

    def __init__(
        self,
        config: FrozenConfigDict,
        in_size: int,
        out_size: int,
        *,
        rngs: nnx.Rngs,
        use_bias: bool = False,
        out_dtype: str | None = None,
    ):
        self.dtype = config.dtype
        self.out_dtype = out_dtype or config.dtype
        self.kernel = normal(rngs, (in_size, out_size), config.initializer_range)
        self.bias = nnx.Param(jnp.zeros(out_size)) if use_bias else None

    def __call__(self, x: Float[Array, "... in"]) -> Float[Array, "... out"]:
        """Multiplies the last axis."""
        y = jnp.dot(
            x.astype(self.dtype),
            self.kernel[...].astype(self.dtype),
            preferred_element_type=jnp.dtype(self.out_dtype),
        )
        return y if self.bias is None else y + self.bias[...].astype(self.out_dtype)


class RMSNorm(nnx.Module):
    """x / sqrt(mean x^2 + eps) * scale over the last axis, in float32."""

    def __init__(self, config: FrozenConfigDict, size: int):
        self.dtype = config.dtype
        self.eps = config.norm_eps
        self.scale = nnx.Param(jnp.ones(size))

    def __call__(
        self, x: Float[Array, "... D"], gate: Float[Array, "... D"] | None = None
    ) -> Float[Array, "... D"]:
        """The normalised x, times swish(gate) if there is one."""
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps) * self.scale[...]
        if gate is not None:
            x = x * jax.nn.silu(gate.astype(jnp.float32))
        return x.astype(self.dtype)


def l2_norm(x: Float[Array, "... K"], eps: float = 1e-6) -> Float[Array, "... K"]:
    """x / sqrt(sum x^2 + eps) over the last axis, in float32 inside."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + eps)).astype(x.dtype)


class ShortConv(nnx.Module):
    """A causal convolution of each channel over `conv_size` tokens, then SiLU.

    Tokens of an earlier segment count as zeros. Between calls it keeps its last conv_size - 1
    inputs.
    """

    def __init__(self, config: FrozenConfigDict, channels: int, *, rngs: nnx.Rngs):
        self.dtype = config.dtype
        self.channels = channels
        self.kernel = normal(rngs, (config.conv_size, channels), config.initializer_range)

    def __call__(
        self,
        x: Float[Array, "B T C"],
        segments: Segments,
        tail: Float[Array, "B W-1 C"] | None,
    ) -> tuple[Float[Array, "B T C"], Float[Array, "B W-1 C"]]:
        """The convolved x, and the tail for the next call."""
        kernel = self.kernel[...].astype(jnp.float32)
        reach = kernel.shape[0] - 1
        if tail is None:
            tail = self.init_cache(x.shape[0])
        padded = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
        y = jnp.zeros((), jnp.float32)
        for back in range(
            reach + 1
        ):  # the input of `back` tokens ago; the kernel's last tap is now
            past = padded[:, reach - back : reach - back + x.shape[1]]
            if back and segments.position is not None:
                past = jnp.where((segments.position >= back)[..., None], past, 0)
            y = y + past * kernel[reach - back]
        return jax.nn.silu(y).astype(self.dtype), padded[:, x.shape[1] :].astype(self.dtype)

    def init_cache(self, batch_size: int) -> Float[Array, "B W-1 C"]:
        """The tail before the first token."""
        return jnp.zeros((batch_size, self.kernel.shape[-2] - 1, self.channels), self.dtype)


class SwiGLU(nnx.Module):
    """down(swish(gate x) * up x)."""

    def __init__(self, config: FrozenConfigDict, *, rngs: nnx.Rngs):
        outer, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(config, outer, inner, rngs=rngs)
        self.up_proj = Linear(config, outer, inner, rngs=rngs)
        self.down_proj = Linear(config, inner, outer, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Token by token."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Embed(nnx.Module):
    """A vector for each token id. An id outside the vocabulary gives NaN."""

    def __init__(self, config: FrozenConfigDict, *, rngs: nnx.Rngs):
        self.dtype = config.dtype
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = normal(rngs, shape, config.initializer_range)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The tokens' vectors."""
        return jnp.take(self.embedding[...], tokens, axis=0).astype(self.dtype)

    def attend(self, x: Float[Array, "B T D"]) -> Float[Array, "B T vocab"]:
        """The scores of a head that shares the embedding, float32."""
        embedding = self.embedding[...].astype(self.dtype)
        return jnp.dot(x, embedding.T, preferred_element_type=jnp.float32)
