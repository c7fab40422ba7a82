"""Token mixers. Each maps x [B, T, D] to y [B, T, D], causally and within segments.

    y, cache, diagnostics = mixer(x, segments, cache, diagnostics)
    y, caches = mixer.step(x, segments, LayerCache(caches, layer))      T = 1, generation

`cache` is None (nothing is kept) or what `mixer.init_cache` or an earlier call returned; `caches` those
of all layers, stacked.
"""

from typing import Any

from ccq_jax.mixers.attention import Attention
from ccq_jax.mixers.gated_deltanet import GatedDeltaNet
from ccq_jax.mixers.gla import GLA

MIXERS: dict[str, Any] = {"gated_deltanet": GatedDeltaNet, "gla": GLA, "attention": Attention}
