"""AdamW with a linear warm-up, a cosine, clipping, and weight decay on matrices only."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree
from ml_collections import ConfigDict

from ccq_jax.sharding import is_stacked, path_name


def learning_rate(step: int | Int[Array, ""], config: ConfigDict) -> Float[Array, ""]:
    """The rate of update number `step`, counted from 1; `config` is `config.train`.

    It rises linearly to `learning_rate` at step `warmup_steps` and falls along half a cosine to
    `final_lr_fraction` of that at step `steps`. The cosine depends on `steps`: a run that is
    continued with a larger `steps` follows the longer cosine from there on.
    """
    step = jnp.asarray(step, jnp.float32)
    warmup = step / max(config.warmup_steps, 1)
    progress = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(progress, 0, 1)))
    decayed = config.final_lr_fraction + (1 - config.final_lr_fraction) * cosine
    return config.learning_rate * jnp.where(step < config.warmup_steps, warmup, decayed)


def is_matrix(params: PyTree[Array]) -> PyTree[bool]:
    """True for the parameters that are decayed: two axes or more, the layers' axis not counted.

    Norm scales, biases, A_log and dt_bias are vectors, and are left alone.
    """

    def matrix(path, x) -> bool:
        return x.ndim - is_stacked(path_name(path)) >= 2

    return jax.tree_util.tree_map_with_path(matrix, params)


def is_ccq(params: PyTree[Array]) -> PyTree[bool]:
    """True for the parameters that CCQ adds to a backbone."""
    return jax.tree_util.tree_map_with_path(lambda path, _: "/ccq/" in path_name(path), params)


def trainable(params: PyTree[Array], config: ConfigDict) -> PyTree[Array]:
    """The parameters, of which those that are not trained have no gradient."""
    if not config.only_ccq:
        return params
    stop = lambda x, trained: x if trained else jax.lax.stop_gradient(x)
    return jax.tree.map(stop, params, is_ccq(params))


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """The optimiser of `config.train`; its moments have the parameters' dtype, float32.

    With `only_ccq` the other parameters have neither moments nor updates.
    """
    adamw = optax.adamw(
        # Optax counts updates from 0.
        lambda count: learning_rate(count + 1, config),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        mask=is_matrix,
    )
    steps = [] if config.clip_norm == 0 else [optax.clip_by_global_norm(config.clip_norm)]
    steps.append(adamw)
    if config.ccq_lr_scale != 1:
        steps.append(optax.masked(optax.scale(config.ccq_lr_scale), is_ccq))
    optimizer = optax.chain(*steps) if len(steps) > 1 else adamw
    if not config.only_ccq:
        return optimizer
    label = lambda params: jax.tree.map(lambda x: "train" if x else "keep", is_ccq(params))
    return optax.partition({"train": optimizer, "keep": optax.set_to_zero()}, label)
