"""The training loop: from a configuration to a directory with a trained model."""

import math
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from ccq_jax import finetune, flops, plots, step, validation
from ccq_jax.checkpoint import Checkpoints, version_changes
from ccq_jax.config import resolve, validate
from ccq_jax.console import Reporter
from ccq_jax.data import make_loader, make_tokenizer, required_vocab_size, validate_data
from ccq_jax.metrics import MetricsWriter
from ccq_jax.optimizer import learning_rate
from ccq_jax.runtime import Profiler, StopSignals, Stopwatch
from ccq_jax.sharding import BATCH, make_mesh
from ccq_jax.workdir import WorkdirError, open_run


class ConfigError(ValueError):
    """The configuration cannot run here."""


class NonFiniteError(FloatingPointError):
    """The loss or a gradient is not finite."""


def train(config: ConfigDict, workdir: str | os.PathLike, *, profile_steps: int = 0) -> None:
    """Trains the model of `config`, or goes on with the run that is in `workdir`.

    The run continues from its newest checkpoint as if it had never stopped: on the same devices and
    versions, bit for bit. SIGINT and SIGTERM save a checkpoint and exit with 128 + the signal.

    Args:
      config: see `ccq_jax.config`.
      workdir: see `ccq_jax.workdir`. Several processes share one.
      profile_steps: steps to trace with jax.profiler, into `workdir`/profile.

    Raises:
      ConfigError: the configuration cannot run.
      WorkdirError: `workdir` holds something else, or a run of another configuration.
      NonFiniteError: training failed; the newest checkpoint is from before.
      SystemExit: a signal came.
    """
    config, mesh = _prepare(config, Path(workdir).expanduser())
    kept = config.checkpoint
    with (
        open_run(workdir, config) as path,
        jax.set_mesh(mesh),
        Checkpoints(path, kept.keep, kept.keep_best) as checkpoints,
        StopSignals() as signals,
    ):
        run = Run(config, path, mesh, checkpoints, signals)
        with (
            Reporter(config.train.steps, run.step) as run.reporter,
            MetricsWriter(path, run.step) as run.writer,
        ):
            run.announce()
            stopped = run.train(Profiler(path, run.step, profile_steps))
            run.draw()
            checkpoints.wait()
            run.conclude(stopped)
    if stopped:
        raise SystemExit(128 + stopped)


def _prepare(config: ConfigDict, workdir: Path) -> tuple[ConfigDict, Mesh]:
    """The resolved configuration and the mesh; raises ConfigError before anything is spent."""
    try:
        validate(config)
        if config.init_from:
            config = finetune.adopt(config, workdir)
            validate(config)
        validate_data(config)
        config = resolve(config, required_vocab_size(config))
        mesh = make_mesh(**config.mesh)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    size, accumulation = config.train.batch_size, config.train.accumulation
    if size % (mesh.size * accumulation):
        raise ConfigError(
            f"train.batch_size is {size}: it must be a multiple of {mesh.size} devices x "
            f"train.accumulation {accumulation} = {mesh.size * accumulation}"
        )
    return config, mesh


class Run:
    """A run between its start and its end: the state, the data, and what is done with them."""

    reporter: Reporter
    writer: MetricsWriter

    def __init__(
        self,
        config: ConfigDict,
        path: Path,
        mesh: Mesh,
        checkpoints: Checkpoints,
        signals: StopSignals,
    ):
        self.config, self.path, self.mesh = config, path, mesh
        self.checkpoints, self.signals = checkpoints, signals
        self.tokenizer = make_tokenizer(config.data.tokenizer)
        self.graphdef, self.abstract = step.abstract_state(config, mesh)
        self.notes: list[str] = []
        self.step, position, documents = self._restore()
        part = {"process_index": jax.process_index(), "process_count": jax.process_count()}
        self.loader = make_loader(config, split="train", start=position, **part)
        if documents not in (None, self.loader.documents):
            self.notes.append(
                f"the documents of {config.data.source} are not those that this run began with: "
                "it goes on with the new ones, and may see some text twice or not at all"
            )
        self.validation = validation.validation_batches(config, **part)
        self.unigram_loss = validation.unigram_loss(self.validation)
        self.loss_sums = validation.make_loss_sums(
            self.graphdef, self.tokenizer.bytes_per_token, config.train.loss_chunk
        )
        # The first line of the metrics, where the run begins from a trained model.
        self.start: dict[str, Any] | None = None
        if config.init_from and self.step == 0:
            self.notes.append(self._describe_start())
        self.flops_per_token = flops.train_flops_per_token(config.model, config.train.seq_len)
        self.stopwatch = Stopwatch(self.step)
        self.validation_loss = math.inf  # of this step, if it was evaluated

    def _restore(self) -> tuple[int, int, list[str] | None]:
        """Sets the state. Returns its step, the data's position, and the documents' fingerprints."""
        latest = self.checkpoints.latest()
        if latest is None:
            self.state = step.init_state(self.config, self.abstract)
            if self.config.init_from:
                self.state["params"] = finetune.load_parameters(self.config, self.state["params"])
                if "ema" in self.state:
                    self.state["ema"] = jax.tree.map(jnp.copy, self.state["params"])
            return 0, 0, None
        self.state, meta = self.checkpoints.restore(latest, self.abstract)
        if meta["tokenizer"] != self.tokenizer.fingerprint:
            raise WorkdirError(
                f"data.tokenizer is {self.config.data.tokenizer!r}: its vocabulary is not the one "
                f"that the run in {self.path} was trained with"
            )
        self.notes = [f"continues from step {latest}", *version_changes(meta["versions"])]
        return latest, meta["position"], meta["documents"]

    def _describe_start(self) -> str:
        """Where a run stands that begins from a trained model; also sets `start`."""
        config, params = self.config, self.state["params"]
        found = validation.validation_loss(self.loss_sums, params, map(self._put, self.validation))
        self.start = {"step": 0, "tokens": 0}
        self.start |= {f"eval/{name}": value for name, value in found.items()}
        said = f"begins from {config.init_from}, with a validation loss of {found['loss']:.4f}"
        if not config.model.ccq.enabled:
            return said
        few = self.validation[0]["inputs"][: jax.local_device_count(), :1024]
        change = finetune.change_of_logits(config, params, self._put({"inputs": few})["inputs"])
        return f"{said}; CCQ changes logits by {float(change):.1e} at most"

    def announce(self) -> None:
        """Says what is about to run."""
        model, train, mesh = self.config.model, self.config.train, self.mesh
        count = sum(math.prod(x.shape) for x in jax.tree.leaves(self.abstract["params"]))
        tokens = train.batch_size * train.seq_len
        device = mesh.devices.flat[0].device_kind
        ccq = " with CCQ" if model.ccq.enabled else ""
        say = self.reporter.say
        say(f"model    {model.mixer}{ccq}, {count:,} parameters, {model.dtype} compute")
        say(
            f"data     {self.config.data.source}, {self.config.data.tokenizer} tokens; a unigram "
            f"model of the validation data has a loss of {self.unigram_loss:.4f} nats/token"
        )
        say(
            f"steps    {train.steps:,} of {train.batch_size} x {train.seq_len} = {tokens:,} "
            f"tokens, {train.steps * tokens:,} in all"
        )
        say(
            f"devices  {mesh.size} x {device}: data={mesh.shape['data']}, fsdp={mesh.shape['fsdp']}"
        )
        say(f"compute  {self.flops_per_token / 1e9:,.3g} GFLOPs a token, forward and backward")
        say(f"workdir  {self.path}")
        for note in self.notes:
            say(note)
        if self.start is not None:
            self.writer.write(self.start)

    def train(self, profiler: Profiler) -> int:
        """Trains to the last step, or until a signal: returns that, or 0.

        The next step is dispatched before the metrics of the last are fetched, so the device does
        not wait for the host. Steps that are evaluated or saved are waited for.
        """
        last = self.config.train.steps
        if self.step >= last:
            self.reporter.say(f"step {last} is reached: a larger train.steps continues the run")
            return 0
        train_step = self._compile()
        pending: tuple[int, step.Metrics] | None = None
        stop = 0
        for number in range(self.step + 1, last + 1):
            profiler.before(number, self.state)
            self.state, metrics = train_step(self.state, self._next_batch())
            self.step = number
            if pending is not None:
                stop = self._finish(*pending)
            pending = number, metrics
            stop = stop or self.signals.alone()
            if stop or self._is_evaluated(number) or self._is_saved(number):
                stop = self._finish(*pending) or stop
                pending = None
                if stop or self._is_saved(number):
                    self._save()
            if stop:
                break
        profiler.stop(self.state)
        self.loader.close()
        return stop

    def _compile(self):
        """The train step, compiled for these devices."""
        train_step = step.make_train_step(self.graphdef, self.config, self.abstract, self.mesh)
        start = time.monotonic()
        compiled = train_step.lower(
            self.abstract, step.abstract_batch(self.config, self.mesh)
        ).compile()
        self.reporter.say(f"compiled in {time.monotonic() - start:.1f} s")
        self.reporter.restart_clock()
        self.stopwatch.rate(self.step)
        return compiled

    def _next_batch(self) -> step.Batch:
        # Every process adds the signal that it got; the step finds the largest, so that all
        # processes learn of it at the same step.
        stop = np.full(jax.local_device_count(), self.signals.received, np.int32)
        return self._put({**next(self.loader), "stop": stop})

    def _put(self, batch: dict[str, np.ndarray]) -> step.Batch:
        """This process's rows, as its part of arrays over all devices."""
        sharding = NamedSharding(self.mesh, BATCH)
        return {
            name: jax.make_array_from_process_local_data(sharding, rows)
            for name, rows in batch.items()
        }

    def _is_evaluated(self, number: int) -> bool:
        every = self.config.eval.every
        return number == self.config.train.steps or (every > 0 and number % every == 0)

    def _is_saved(self, number: int) -> bool:
        return number == self.config.train.steps or number % self.config.checkpoint.every == 0

    def _is_logged(self, number: int) -> bool:
        every = self.config.train.log_every
        return number == 1 or number % every == 0 or self._is_evaluated(number)

    def _finish(self, number: int, metrics: step.Metrics) -> int:
        """Waits for a step, checks it and writes its line. Returns the signal it carried, or 0."""
        loss, grad_norm, stop = jax.device_get(
            (metrics["loss"], metrics["grad_norm"], metrics["stop"])
        )
        if not (np.isfinite(loss) and np.isfinite(grad_norm)):
            raise NonFiniteError(self._describe_failure(number, float(loss), metrics))
        self.reporter.advance(number)
        self.validation_loss = math.inf
        if self._is_logged(number):
            line = self._line(number, float(loss), float(grad_norm), metrics)
            if self._is_evaluated(number):
                line |= self._evaluate()
            self.writer.write(line)
            self.reporter.log(line)
            if self._is_evaluated(number) and number < self.config.train.steps:
                self.draw()
        return int(stop)

    def _line(
        self, number: int, loss: float, grad_norm: float, metrics: step.Metrics
    ) -> dict[str, Any]:
        per_step = self.config.train.batch_size * self.config.train.seq_len
        speed = per_step * self.stopwatch.rate(number)
        line: dict[str, Any] = {
            "step": number,
            "tokens": number * per_step,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": float(learning_rate(number, self.config.train)),
            "tokens_per_second": speed,
        }
        peak = flops.peak_flops(self.mesh.devices.flat[0].device_kind)
        if peak is not None:
            line["mfu"] = speed * self.flops_per_token / (peak * self.mesh.size)
        for name, value in jax.device_get(metrics["diagnostics"]).items():
            line[f"ccq/{name}"] = value.tolist()
        return line

    def _evaluate(self) -> dict[str, float]:
        with self.stopwatch.pause():
            batches = map(self._put, self.validation)
            found = validation.validation_loss(self.loss_sums, self.state["params"], batches)
        self.validation_loss = found["loss"]
        return {
            "eval/loss": found["loss"],
            "eval/bits_per_byte": found["bits_per_byte"],
            "eval/unigram_loss": self.unigram_loss,
        }

    def _save(self) -> None:
        meta = {
            "position": self.loader.position,
            "documents": self.loader.documents,
            "tokenizer": self.tokenizer.fingerprint,
            "processes": jax.process_count(),
            "config": self.config.to_dict(),
        }
        with self.stopwatch.pause():
            self.checkpoints.save(self.step, self.state, meta, self.validation_loss)

    def draw(self) -> None:
        """Draws the plots anew."""
        if jax.process_index() == 0:
            with self.stopwatch.pause():
                plots.draw(self.path)

    def conclude(self, stopped: int) -> None:
        """Says how it ended and where things are."""
        kept = ", ".join(map(str, self.checkpoints.steps()))
        if stopped:
            self.reporter.say(f"stopped by signal {stopped} at step {self.step}; saved")
        self.reporter.say(f"checkpoints of steps {kept}; metrics and plots in {self.path}")

    def _describe_failure(self, number: int, loss: float, metrics: step.Metrics) -> str:
        size = self.config.train.batch_size
        names = step.nonfinite_gradients(jax.device_get(metrics["grad_squares"]))
        self.checkpoints.wait()
        latest = self.checkpoints.latest()
        return (
            f"step {number} is not finite: loss {loss}, gradient norm {metrics['grad_norm']:.4g}.\n"
            f"The batch is number {number - 1} of the training data, counted from 0: its rows "
            f"{(number - 1) * size} to {number * size - 1}.\n"
            f"Gradients that are not finite: {', '.join(names) or 'none'}.\n"
            + (
                "There is no checkpoint yet."
                if latest is None
                else f"The last good checkpoint is of step {latest}, in {self.path}."
            )
        )
