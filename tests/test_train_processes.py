"""Several processes train one model."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from training import lines

from ccq_jax.checkpoint import load_model
from ccq_jax.parameters import RunParameters
from ccq_jax.workdir import checkpoint_steps

TESTS = Path(__file__).parent


def launch(workdir: Path, data: Path, index: int, count: int, port: int) -> subprocess.Popen:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS))),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    if count > 1:
        environment |= {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(index),
        }
    script = TESTS.parent / "train.py"
    flags = [f"--config={TESTS / 'tiny_run.py'}:{data},attention", f"--workdir={workdir}"]
    flags += ["--config.mesh.data=-1", f"--config.mesh.fsdp={count}"]
    return subprocess.Popen(
        [sys.executable, "-u", str(script), *flags],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


@pytest.mark.slow
def test_two_processes_train_as_one_and_stop_together(tmp_path):
    data = tmp_path / "data"
    alone = launch(tmp_path / "alone", data, 0, 1, 0)
    said, _ = alone.communicate(timeout=300)
    assert alone.returncode == 0, said

    port = free_port()
    pair = [launch(tmp_path / "pair", data, index, 2, port) for index in (0, 1)]
    heard = []
    for line in pair[0].stdout:
        heard.append(line)
        if line.startswith("step 4/"):
            pair[1].send_signal(signal.SIGTERM)  # the other one, which has to tell the first
    codes = [process.wait(timeout=300) for process in pair]
    said = "".join(heard) + pair[1].stdout.read()
    assert codes == [143, 143], said
    stopped = checkpoint_steps(tmp_path / "pair")[-1]
    assert 4 < stopped < 12
    assert f"stopped by signal 15 at step {stopped}" in said

    # One process reads what both wrote, one parameter after the other.
    run = RunParameters(tmp_path / "pair")
    whole = nnx.to_flat_state(nnx.state(load_model(tmp_path / "pair").model, nnx.Param))
    assert len(whole) == len(run.shapes)
    for path, leaf in whole:
        np.testing.assert_array_equal(run.read(".".join(map(str, path))), leaf[...])

    # What two processes began, one ends.
    rest = launch(tmp_path / "pair", data, 0, 1, 0)
    said, _ = rest.communicate(timeout=300)
    assert rest.returncode == 0, said
    assert f"continues from step {stopped}" in said
    for line, expected in zip(lines(tmp_path / "pair"), lines(tmp_path / "alone"), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=2e-5)
        if "eval/loss" in expected:
            assert line["eval/loss"] == pytest.approx(expected["eval/loss"], rel=2e-5)
