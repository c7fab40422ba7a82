"""Checkpoints of a run: state, data position, configuration and versions.

Orbax's CheckpointManager writes to a temporary directory in the background and renames it when it
is whole, so a checkpoint is finished or does not exist. One that is no longer kept is renamed away
before its files are deleted, so a half-deleted one cannot be mistaken for a finished one either.
"""

import importlib.metadata
import math
import operator
import platform
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import SingleDeviceSharding
from ml_collections import ConfigDict
from orbax.checkpoint.checkpoint_managers import preservation_policy

from ccq_jax import workdir as workdirs
from ccq_jax.config import resolve_model
from ccq_jax.model import LanguageModel
from ccq_jax.sharding import parameter_shardings

_DELETED = "deleted"
ITEMS = ("params", "ema", "opt_state")  # of the state; `ema` only where a run keeps it
_PACKAGES = ("ccq_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class Checkpoints:
    """The checkpoints under `workdir`; a context manager that finishes the last save on leaving.

    Args:
      workdir: the run's directory.
      keep: the newest that are kept.
      keep_best: those of lowest validation loss that are kept besides.
      read_only: only look.
    """

    def __init__(
        self, workdir: Path, keep: int = 1, keep_best: int = 0, *, read_only: bool = False
    ):
        self._directory = Path(workdir) / workdirs.CHECKPOINTS
        kept = [
            preservation_policy.LatestN(keep),
            preservation_policy.BestN(get_metric_fn=lambda m: -m["loss"], n=keep_best),
        ]
        writing = {
            "preservation_policy": preservation_policy.AnyPreservationPolicy(kept),
            "cleanup_tmp_directories": True,
            "todelete_subdir": _DELETED,
        }
        self._manager = ocp.CheckpointManager(
            self._directory,
            item_names=(*ITEMS, "meta"),
            options=ocp.CheckpointManagerOptions(
                best_fn=operator.itemgetter("loss"),
                best_mode="min",
                create=not read_only,
                save_root_metadata=False,
                **({} if read_only else writing),
            ),
        )
        if not read_only:
            self._empty_bin()

    @classmethod
    def of_run(cls, workdir: str | Path) -> "Checkpoints":
        """To look at the checkpoints of the run in `workdir`; WorkdirError if there are none."""
        path = Path(workdir).expanduser().absolute()
        if workdirs.read_config(path) is None:
            raise workdirs.WorkdirError(
                f"{path} holds no run: train one with train.py --workdir={path}"
            )
        if not workdirs.checkpoint_steps(path):
            raise workdirs.WorkdirError(f"the run in {path} has no checkpoint yet")
        return cls(path, read_only=True)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception) -> None:
        self._manager.close()

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        """The newest step, or None."""
        return self._manager.latest_step()

    def best(self) -> int | None:
        """The step of lowest validation loss, or None where no checkpoint has one."""
        step = self._manager.best_step()
        known = step is not None and self._manager.metrics(step)["loss"] < math.inf
        return step if known else None

    def find(self, step: int | str) -> int:
        """The step that "latest", "best" or a step stands for; WorkdirError if it is not there."""
        names = {"latest": self.latest, "best": self.best}
        found = names.get(str(step), lambda: step)()
        run = f"the run in {self._directory.parent}"
        if found is None:
            raise workdirs.WorkdirError(f"no checkpoint of {run} has a validation loss")
        if found not in self.steps():
            known = ", ".join(map(str, self.steps()))
            raise workdirs.WorkdirError(
                f"step is {step!r}: it must be 'latest', 'best' or one of {known} ({run})"
            )
        return int(found)

    def save(
        self,
        step: int,
        state: dict[str, Any],
        meta: dict[str, Any],
        validation_loss: float = math.inf,
    ) -> None:
        """Saves `state` in the background, once the save before is finished.

        Returns when the state is copied to the host: it may be donated then.

        Args:
          step: updates that made this state.
          state: "params" and "opt_state", and "ema" if the run averages its parameters.
          meta: anything that JSON holds, beside `step` and `versions`.
          validation_loss: infinite where it is not known: such a state is never the best.
        """
        self.wait()
        self._empty_bin()
        self._manager.save(
            step,
            args=ocp.args.Composite(
                **{name: ocp.args.StandardSave(tree) for name, tree in state.items()},
                meta=ocp.args.JsonSave(meta | {"step": step, "versions": versions()}),
            ),
            metrics={"loss": validation_loss},
            force=True,
        )

    def restore(self, step: int, abstract: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state and the meta saved at `step`.

        Args:
          step: one of `steps()`.
          abstract: the state's ShapeDtypeStructs; their shardings say where the arrays go, which
            need not be the mesh that they came from.
        """
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                **{name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()},
                meta=ocp.args.JsonRestore(),
            ),
        )
        return {name: restored[name] for name in abstract}, restored["meta"]

    def restore_params(self, step: int, abstract: Any) -> Any:
        """The parameters alone."""
        args = ocp.args.Composite(params=ocp.args.StandardRestore(abstract))
        return self._manager.restore(step, args=args)["params"]

    def meta(self, step: int) -> dict[str, Any]:
        """What `save` was given as `meta`, with the step and the versions."""
        args = ocp.args.Composite(meta=ocp.args.JsonRestore())
        return self._manager.restore(step, args=args)["meta"]

    def wait(self) -> None:
        """Returns when the save that is under way is finished; raises if it failed."""
        self._manager.wait_until_finished()

    def _empty_bin(self) -> None:
        if jax.process_index() == 0:
            shutil.rmtree(self._directory / _DELETED, ignore_errors=True)


def versions() -> dict[str, str]:
    """Python's version and those of the packages that results depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # run from a checkout
            continue
    return found


def version_changes(before: dict[str, str]) -> list[str]:
    """What differs here from the versions that a checkpoint was made with; then bits may differ."""
    now = versions()
    return [
        f"{name} is {now.get(name, 'absent')} here; the checkpoint was made with {version}"
        for name, version in before.items()
        if now.get(name) != version
    ]


class Trained(NamedTuple):
    """A checkpoint's model, with the configuration that it was trained with."""

    config: ConfigDict
    model: LanguageModel
    step: int


# Fields of `config.model` that may be others at test time: they are no part of what was learned.
TEST_TIME = (r"implementation|chunk_size|ccq\.fixed_lambda",)


def load_model(
    workdir: str | Path,
    *,
    step: int | str = "latest",
    model: ConfigDict | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Trained:
    """The model of a run.

    Args:
      workdir: the run's directory.
      step: "latest", "best" (lowest validation loss) or a step.
      model: a `config.model` to use instead of the run's. It may differ in the fields of TEST_TIME;
        a vocab_size of 0 fits any.
      mesh: where the parameters go, by `sharding.RULES`; None is the first device.

    Raises:
      WorkdirError: there is no such run, no such checkpoint, or `model` is another model.
    """
    path = Path(workdir).expanduser().absolute()
    with Checkpoints.of_run(path) as checkpoints:
        number = checkpoints.find(step)
        config = ConfigDict(checkpoints.meta(number)["config"])
        if model is not None and config.get("init_from"):
            config.model = _adopted(config.model, model)
        elif model is not None:
            config.model = _at_test_time(config.model, model, path)
        config.lock()
        graphdef, variables = nnx.split(
            nnx.eval_shape(lambda: LanguageModel(config.model, rngs=nnx.Rngs(0)))
        )
        abstract = nnx.to_pure_dict(variables)
        if mesh is None:
            here = SingleDeviceSharding(jax.local_devices()[0])
            shardings = jax.tree.map(lambda _: here, abstract)
        else:
            shardings = parameter_shardings(abstract, mesh)
        params = checkpoints.restore_params(number, with_shardings(abstract, shardings))
    return Trained(config, nnx.merge(graphdef, params), number)


def _adopted(trained: ConfigDict, asked: ConfigDict) -> ConfigDict:
    """A backbone's model, whose sizes no config file knows, with the fields of TEST_TIME as asked."""
    model = ConfigDict(trained.to_dict())
    model.update(implementation=asked.implementation, chunk_size=asked.chunk_size)
    model.ccq.fixed_lambda = asked.ccq.fixed_lambda
    return model


def _at_test_time(trained: ConfigDict, asked: ConfigDict, path: Path) -> ConfigDict:
    """`asked`, complete, if it differs from what was trained in fields of TEST_TIME only."""
    complete = resolve_model(asked).to_dict()
    complete["vocab_size"] = complete["vocab_size"] or trained.vocab_size
    changes = workdirs.changes(trained.to_dict(), complete, TEST_TIME)
    if changes:
        lines = "\n".join(f"  model.{line}" for line in changes)
        raise workdirs.WorkdirError(f"the run in {path} is of another model:\n{lines}")
    return ConfigDict(complete)


def with_shardings(abstract: Any, shardings: Any) -> Any:
    """ShapeDtypeStructs that also say where they lie."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings
    )
