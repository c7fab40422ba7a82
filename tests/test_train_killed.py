"""Killed with -9 at any moment and started again, a run ends as if it had never stopped."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from training import assert_same_run

from ccq_jax.workdir import checkpoint_steps

TESTS = Path(__file__).parent


def start(number: int, workdir: Path, data: Path) -> tuple[int, str]:
    """Runs train.py; kills it at file operation `number`. Returns its exit code and output."""
    command = [sys.executable, str(TESTS / "killed.py"), str(number), str(workdir)]
    paths = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
    environment = os.environ | {"PYTHONPATH": paths, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*command, f"--config={TESTS / 'tiny_run.py'}:{data},gated_deltanet"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_killed_run_continues_bit_for_bit(tmp_path):
    data = tmp_path / "data"
    code, said = start(0, tmp_path / "whole", data)
    assert code == 0, said
    operations = int(said.split("operations: ")[1].split()[0])

    # Kills fall anywhere: before the first checkpoint, inside a save, while an old one is deleted.
    rng = random.Random(0)
    kept: list[int] = []
    for _ in range(3):
        code, said = start(
            rng.randrange(operations // 6, operations // 2), tmp_path / "killed", data
        )
        assert code == -signal.SIGKILL, said
        steps = checkpoint_steps(tmp_path / "killed")
        assert not kept or steps[-1] >= kept[-1], "a finished checkpoint was lost"
        kept = steps
    code, said = start(0, tmp_path / "killed", data)
    assert code == 0, said
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
