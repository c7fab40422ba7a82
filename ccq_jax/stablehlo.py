"""A model as compiled functions: `jax.export` of prefill and of the decode step, and the parameters.

A folder holds `prefill.bin` and `decode.bin` (StableHLO, for a CPU, a GPU or a TPU), the parameters
in `model.safetensors`, and `stablehlo.json`, which describes them:

    prefill(parameters, tokens [b, SEGMENT s], segment_ids [b, SEGMENT s], cache) -> logits [b, N], cache
    decode(parameters, tokens [b], cache)                                         -> logits [b, N], cache

b and s are any sizes. Parameters and cache are dictionaries of arrays by name. Prompts are padded on
the left, with segment id 0 on the padding and 1 on the prompt. `jax.export.deserialize` reads the
functions back, in any program, without this package. They are programs: read only those of people you
trust.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import export
from jaxtyping import Array, Float, Int, PyTree
from ml_collections import ConfigDict

from ccq_jax.cache import Cache
from ccq_jax.model import LanguageModel
from ccq_jax.parameters import abstract_parameters, read_json
from ccq_jax.state import map_rows
from ccq_jax.tensor_files import Planned, TensorFolder, write_tensors

MANIFEST, FORMAT = "stablehlo.json", "ccq_jax stablehlo 1"
FUNCTIONS = ("prefill", "decode")
PLATFORMS = ("cpu", "cuda", "tpu")
SEGMENT = 128
"""Tokens that prefill reads at once; it goes through a prompt in so many."""

Arrays = dict[str, Array]


def write_functions(directory: Path, config: ConfigDict, dtype: str, max_len: int) -> None:
    """Exports prefill and decode, and describes them in stablehlo.json.

    Args:
      directory: exists.
      config: the complete `config.model`.
      dtype: of the parameters, "float32" or "bfloat16"; the functions compute with their float32
        values, in `config.dtype`.
      max_len: tokens that attention's cache holds, padding included; other mixers have no limit.
    """
    scope = export.SymbolicScope()
    rows, segments = export.symbolic_shape("b, s", scope=scope)
    cache = jax.eval_shape(lambda: _model(config, "scan").init_cache(1, max_len))
    spec = map_rows(
        lambda axis, x: jax.ShapeDtypeStruct(
            (*x.shape[:axis], rows, *x.shape[axis + 1 :]), x.dtype
        ),
        cache,
    )
    flat_cache = _names(spec)
    parameters = {
        name: jax.ShapeDtypeStruct(x.shape, dtype)
        for name, x in _names(abstract_parameters(config), ".").items()
    }
    tokens = jax.ShapeDtypeStruct((rows, SEGMENT * segments), jnp.int32)
    one = jax.ShapeDtypeStruct((rows,), jnp.int32)
    inputs = {"prefill": (tokens, tokens), "decode": (one,)}
    for name, function in functions(config, jax.tree.structure(spec)).items():
        exported = export.export(jax.jit(function), platforms=PLATFORMS)
        blob = exported(parameters, *inputs[name], flat_cache).serialize()
        (directory / f"{name}.bin").write_bytes(blob)
    contents = {
        "format": FORMAT,
        "jax": jax.__version__,
        "platforms": PLATFORMS,
        "segment": SEGMENT,
        "max_len": max_len,
        "cache": {
            name: {
                "shape": [n if isinstance(n, int) else "b" for n in x.shape],
                "dtype": str(x.dtype),
            }
            for name, x in flat_cache.items()
        },
        "model": config.to_dict(),
    }
    (directory / MANIFEST).write_text(json.dumps(contents, indent=2) + "\n")


def write_parameters(
    directory: Path,
    shapes: dict[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    dtype: str,
) -> None:
    """Writes the parameters, one by one, by the names that the functions know them by."""
    names = sorted(shapes)
    plan = [Planned(name, shapes[name]) for name in names]
    write_tensors(directory, plan, map(read, names), dtype=dtype)


def functions(config: ConfigDict, structure: Any) -> dict[str, Callable[..., tuple[Array, Arrays]]]:
    """The functions that are exported, over dictionaries of arrays.

    Each row runs by itself, under vmap, so that what is chosen by the batch's size need not know it.
    """
    axes = Cache(layers=1, segment=0, position=0, length=None)  # type: ignore[arg-type]
    prefill_graph, decode_graph = (
        nnx.split(nnx.eval_shape(lambda i=i: _model(config, i)))[0] for i in ("xla", "scan")
    )

    def rows(graph: nnx.GraphDef, parameters: Arrays, call: Callable) -> Callable:
        model = nnx.merge(graph, _nested(parameters))

        def row(cache: Cache, *inputs: Array) -> tuple[Array, Cache]:
            batch = map_rows(lambda axis, x: jnp.expand_dims(x, axis), cache)
            logits, batch = call(model, batch, *(x[None] for x in inputs))
            return logits[0], map_rows(lambda axis, x: jnp.squeeze(x, axis), batch)

        return lambda cache, *inputs: jax.vmap(
            row, in_axes=(axes, *[0] * len(inputs)), out_axes=(0, axes)
        )(cache, *inputs)

    def prefill(
        parameters: Arrays, tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"], cache: Arrays
    ) -> tuple[Float[Array, "B N"], Arrays]:
        read = rows(prefill_graph, parameters, lambda m, c, t, s: m.prefill(t, c, s))
        cut = lambda x: x.reshape(x.shape[0], -1, SEGMENT).swapaxes(0, 1)
        start = jnp.zeros((tokens.shape[0], config.vocab_size)), _cache(cache, structure)

        def segment(carry, inputs):
            return read(carry[1], *inputs), None

        (logits, new), _ = jax.lax.scan(segment, start, (cut(tokens), cut(segment_ids)))
        return logits, _names(new)

    def decode(
        parameters: Arrays, tokens: Int[Array, " B"], cache: Arrays
    ) -> tuple[Float[Array, "B N"], Arrays]:
        step = rows(decode_graph, parameters, lambda m, c, t: m.step(t, c))
        logits, new = step(_cache(cache, structure), tokens)
        return logits, _names(new)

    return {"prefill": prefill, "decode": decode}


class Exported:
    """The functions of a folder, as `ccq_jax.program.Program` wants them."""

    def __init__(self, manifest: dict[str, Any], functions: dict[str, export.Exported]):
        self.config = manifest["model"]
        self.pieces: tuple[int, ...] = (8 * SEGMENT, SEGMENT)
        self.functions, self._spec = functions, manifest["cache"]
        self._max_len = manifest["max_len"]

    def prefill(self, params: PyTree, tokens: Array, cache: Cache, segment_ids: Array) -> Any:
        """As `LanguageModel.prefill`, of a multiple of SEGMENT tokens."""
        call = self.functions["prefill"].call
        logits, flat = call(params, tokens, segment_ids, _names(cache))
        return logits, self._structured(flat)

    def step(self, params: PyTree, tokens: Array, cache: Cache) -> Any:
        """As `LanguageModel.step`."""
        logits, flat = self.functions["decode"].call(params, tokens, _names(cache))
        return logits, self._structured(flat)

    def init_cache(self, batch_size: int, max_len: int) -> Cache:
        """As `LanguageModel.init_cache`; attention's holds what it was exported for."""
        if self.config["mixer"] == "attention" and max_len > self._max_len:
            raise ValueError(
                f"{max_len} tokens are asked for: this model was exported with --max_len={self._max_len}"
            )
        return self._structured(
            {
                name: jnp.zeros([batch_size if n == "b" else n for n in x["shape"]], x["dtype"])
                for name, x in self._spec.items()
            }
        )

    def _structured(self, flat: Arrays) -> Cache:
        layers = {k.removeprefix("layers/"): x for k, x in flat.items() if k.startswith("layers/")}
        return Cache(layers, flat["segment"], flat["position"], flat["length"])


def load(directory: str | Path) -> tuple[Exported, Arrays]:
    """The functions of a folder, and its parameters.

    Raises:
      ValueError: a file is damaged, or not what it should be.
    """
    path = Path(directory)
    manifest = read_json(path / MANIFEST, FORMAT)
    found = {}
    for name in FUNCTIONS:
        try:
            found[name] = export.deserialize(bytearray((path / f"{name}.bin").read_bytes()))
        except Exception as error:  # flatbuffers and MLIR raise what they like
            raise ValueError(f"{path / name}.bin is no exported function: {error!r}") from error
    with TensorFolder(path) as folder:
        params = {name: jnp.asarray(folder.read(name)) for name in folder.entries}
    return Exported(manifest, found), params


def differences(
    config: ConfigDict, program: Exported, params: Arrays, rows: int
) -> dict[str, float]:
    """||after - before|| / ||before|| of both functions' logits: as traced here, and as read back."""
    rng = np.random.default_rng(rows)
    tokens = rng.integers(0, config.vocab_size, (rows, SEGMENT * rows), np.int32)
    padding = np.arange(SEGMENT * rows) >= np.arange(rows)[:, None]
    cache = program.init_cache(rows, SEGMENT * rows + 1)
    abstract = jax.eval_shape(lambda: _model(config, "scan").init_cache(1, 1))
    structure = jax.tree.structure(abstract)
    traced = functions(config, structure)
    inputs: dict[str, tuple] = {
        "prefill": (tokens, padding.astype(np.int32)),
        "decode": (tokens[:, 0],),
    }
    found, flat = {}, _names(cache)
    for name, x in inputs.items():
        before, new = jax.jit(traced[name])(params, *x, flat)
        after, _ = jax.jit(program.functions[name].call)(params, *x, flat)
        found[name] = float(jnp.linalg.norm(after - before) / jnp.linalg.norm(before))
        flat = new
    return found


def _model(config: ConfigDict, implementation: str) -> LanguageModel:
    config = ConfigDict(config.to_dict())
    config.implementation = "auto" if config.mixer == "attention" else implementation
    return LanguageModel(config, rngs=nnx.Rngs(0))


def _names(tree: PyTree, separator: str = "/") -> dict[str, Any]:
    leaves: Iterable = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator=separator): x for path, x in leaves}


def _nested(parameters: Arrays) -> PyTree[Array]:
    """The model's tree of parameters, float32."""
    tree: dict[str, Any] = {}
    for name, x in parameters.items():
        *outer, last = name.split(".")
        inner = tree
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = x.astype(jnp.float32)
    return tree


def _cache(flat: Arrays, structure: Any) -> Cache:
    names = _names(jax.tree.unflatten(structure, range(structure.num_leaves)))
    return jax.tree.unflatten(structure, [flat[name] for name in names])
