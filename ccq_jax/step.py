"""The training state, and the pure function that takes it one step further."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree
from ml_collections import ConfigDict

from ccq_jax.checkpoint import with_shardings
from ccq_jax.loss import Batch, Diagnostics, model_losses
from ccq_jax.model import LanguageModel
from ccq_jax.optimizer import make_optimizer, trainable
from ccq_jax.sharding import BATCH, is_stacked, parameter_shardings, path_name

State = dict[str, Any]  # "params", "opt_state", and "ema" where `train.ema` is not 0
Metrics = dict[str, Any]


def abstract_state(config: ConfigDict, mesh: Mesh) -> tuple[nnx.GraphDef, State]:
    """The model's structure, and the state's shapes, dtypes and shardings; computes nothing."""
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: _model(config, config.seed)))
    state = jax.eval_shape(lambda: _new_state(config, config.seed))
    return graphdef, with_shardings(state, parameter_shardings(state, mesh))


def abstract_batch(config: ConfigDict, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of what the step takes beside the state; `stop` has a number a device."""
    shape = (config.train.batch_size, config.train.seq_len)
    batch = dict.fromkeys(
        ("inputs", "targets", "segment_ids"), jax.ShapeDtypeStruct(shape, jnp.int32)
    )
    batch["loss_mask"] = jax.ShapeDtypeStruct(shape, jnp.bool_)
    batch["stop"] = jax.ShapeDtypeStruct((mesh.size,), jnp.int32)
    return batch


def init_state(config: ConfigDict, abstract: State) -> State:
    """A new state, made where `abstract` says. It depends on the seed, and not on the mesh."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    return jax.jit(lambda seed: _new_state(config, seed), out_shardings=shardings)(config.seed)


def _model(config: ConfigDict, seed: int | Array) -> LanguageModel:
    return LanguageModel(config.model, rngs=nnx.Rngs(jax.random.key(seed)))


def _new_state(config: ConfigDict, seed: int | Array) -> State:
    params = nnx.to_pure_dict(nnx.state(_model(config, seed), nnx.Param))
    state = {"params": params, "opt_state": make_optimizer(config.train).init(params)}
    if config.train.ema:
        state["ema"] = jax.tree.map(jnp.copy, params)
    return state


def make_train_step(
    graphdef: nnx.GraphDef, config: ConfigDict, abstract: State, mesh: Mesh
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """The jitted step. The state is donated; the metrics are replicated.

    Metrics: `loss` (nats a target, mean over the batch's targets), `grad_norm` (before clipping),
    `grad_squares` (of each parameter, layer by layer), `diagnostics`, `stop` (the batch's largest).
    """
    train = config.train
    optimizer = make_optimizer(train)
    shardings = jax.tree.map(lambda x: x.sharding, abstract)

    def loss_fn(
        params: PyTree[Array], batch: Batch, count: Float[Array, ""]
    ) -> tuple[Float[Array, ""], Diagnostics]:
        params = trainable(params, train)
        losses, diagnostics = model_losses(
            graphdef, params, batch, train.loss_chunk, diagnostics=True
        )
        return jnp.sum(losses * batch["loss_mask"]) / count, diagnostics

    def gradients(params: PyTree[Array], batch: Batch):
        # Slices are weighted by the whole batch's targets, so that their sum is the batch's mean.
        count = jnp.maximum(jnp.sum(batch["loss_mask"], dtype=jnp.float32), 1)
        compute = jax.value_and_grad(loss_fn, has_aux=True)
        if train.accumulation == 1:
            return compute(params, batch, count)

        def add(total, piece):
            (loss, diagnostics), grads = compute(params, piece, count)
            return jax.tree.map(jnp.add, total, (loss, grads)), diagnostics

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        zeros = jax.lax.with_sharding_constraint(
            zeros, (NamedSharding(mesh, P()), shardings["params"])
        )
        (loss, grads), diagnostics = jax.lax.scan(add, zeros, slices(batch, train.accumulation))
        return (loss, jax.tree.map(lambda x: jnp.mean(x, axis=0), diagnostics)), grads

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        batch = dict(batch)
        stop = jnp.max(batch.pop("stop"))
        (loss, diagnostics), grads = gradients(state["params"], batch)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        squares = jax.tree_util.tree_map_with_path(_square_by_layer, grads)
        metrics = {
            "loss": loss,
            "grad_norm": jnp.sqrt(sum(jnp.sum(x) for x in jax.tree.leaves(squares))),
            "grad_squares": squares,
            "diagnostics": diagnostics,
            "stop": stop,
        }
        new = {"params": params, "opt_state": opt_state}
        if train.ema:
            new["ema"] = optax.incremental_update(params, state["ema"], 1 - train.ema)
        return new, metrics

    batch_sharding = NamedSharding(mesh, BATCH)
    return jax.jit(
        train_step,
        in_shardings=(shardings, batch_sharding),
        out_shardings=(shardings, NamedSharding(mesh, P())),
        donate_argnums=0,
    )


def slices(batch: Batch, count: int) -> Batch:
    """Cuts the batch [B, ...] into `count` slices [count, B / count, ...].

    Slice i has the rows i, i + count, i + 2 count, ...: of a batch that is spread over devices,
    each device then has its part of every slice already.
    """
    return jax.tree.map(
        lambda x: x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1), batch
    )


def _square_by_layer(path, grad: Array) -> Float[Array, "..."]:
    stacked = is_stacked(path_name(path))
    axes = tuple(range(int(stacked), grad.ndim))
    return jnp.sum(jnp.square(grad.astype(jnp.float32)), axis=axes)


def nonfinite_gradients(grad_squares: PyTree[Array]) -> list[str]:
    """Names of the parameters whose gradient is not finite, with the layers where it is not."""
    names = []
    for path, squares in jax.tree_util.tree_leaves_with_path(grad_squares):
        bad = np.flatnonzero(~np.isfinite(np.asarray(squares)))
        if bad.size == 0:
            continue
        name = path_name(path)
        if np.ndim(squares):
            every = bad.size == np.size(squares)
            name += " (all layers)" if every else f" (layers {', '.join(map(str, bad))})"
        names.append(name)
    return names
