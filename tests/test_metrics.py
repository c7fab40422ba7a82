"""metrics.jsonl, the plots that are drawn from it, and what is said on the way."""

import io

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from ccq_jax import metrics, plots
from ccq_jax.console import Reporter, duration
from ccq_jax.metrics import FILE, MetricsWriter


def line(step, **more):
    return {"step": step, "tokens": 10 * step, "loss": 5.0 / step} | more


def write(workdir, steps, after=0):
    with MetricsWriter(workdir, after) as writer:
        for step in steps:
            writer.write(line(step))


def test_each_step_is_there_once_when_a_run_continues(tmp_path):
    write(tmp_path, [1, 2, 3, 4, 5])
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    write(tmp_path, [4, 5, 6], after=3)
    assert metrics.read(tmp_path) == [line(step) for step in (1, 2, 3, 4, 5, 6)]


def test_a_new_run_forgets_the_steps_of_one_that_was_never_saved(tmp_path):
    write(tmp_path, [1, 2, 3])
    write(tmp_path, [1])
    assert [found["step"] for found in metrics.read(tmp_path)] == [1]


def test_lines_are_in_the_file_before_the_run_ends(tmp_path):
    with MetricsWriter(tmp_path, 0) as writer:
        writer.write(line(1))
        assert metrics.read(tmp_path) == [line(1)]


def test_series_skips_lines_without_the_name():
    steps, values = metrics.series([line(1), line(2, x=3.0), line(3), line(4, x=1.0)], "x")
    np.testing.assert_array_equal(steps, [2, 4])
    np.testing.assert_array_equal(values, [3.0, 1.0])


def run_lines(layers, heads, count=30, ccq=True):
    rng = np.random.default_rng(0)
    lines = []
    for step in range(1, count + 1):
        made = line(step, grad_norm=float(rng.random()) + 0.1, learning_rate=1e-3)
        if ccq:
            for name, *_ in plots.CURVATURE:
                made[f"ccq/{name}"] = (3 * rng.random((layers, heads))).tolist()
        if step % 10 == 0:
            made |= {"eval/loss": 2.0, "eval/bits_per_byte": 3.0, "eval/unigram_loss": 3.5}
        lines.append(made)
    return lines


@pytest.mark.parametrize(
    ("layers", "heads", "ccq"), [(2, 2, True), (24, 16, True), (1, 1, True), (2, 2, False)]
)
def test_plots_are_drawn_from_the_lines(tmp_path, layers, heads, ccq):
    with MetricsWriter(tmp_path, 0) as writer:
        for made in run_lines(layers, heads, ccq=ccq):
            writer.write(made)
    drawn = plots.draw(tmp_path)
    names = {"loss.png", "learning_rate.png"} | ({"ccq.png"} if ccq else set())
    assert {path.name for path in drawn} == names
    assert {path.name for path in (tmp_path / "plots").iterdir()} == names
    for path in drawn:
        with Image.open(path) as image:
            assert min(image.size) > 400
            assert np.asarray(image.convert("L")).std() > 5  # not blank


def test_nothing_is_drawn_before_there_are_two_lines(tmp_path):
    write(tmp_path, [1])
    assert plots.draw(tmp_path) == []


def report(terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    with Reporter(20, 10, console) as reporter:
        reporter.advance(11)
        reporter.log(line(11, tokens_per_second=1234.5, grad_norm=1.0, learning_rate=1e-3))
        reporter.log(
            line(12, tokens_per_second=1.0, grad_norm=1.0, learning_rate=1e-3)
            | {"eval/loss": 1.5, "eval/bits_per_byte": 2.25}
        )
    return out.getvalue()


def test_progress_is_plain_lines_where_no_terminal_is():
    said = report(terminal=False).splitlines()
    assert said[0].startswith("step 11/20  loss 0.4545  1,234 tokens/s  grad norm 1.000")
    assert said[0].endswith("left")
    assert said[2] == "step 12: validation loss 1.5000 nats/token, 2.2500 bits/byte"
    assert len(said) == 3


def test_progress_is_a_bar_on_a_terminal():
    said = report(terminal=True)
    assert "━" in said and "tokens/s" in said and "left" in said
    assert "step 11/20" not in said


@pytest.mark.parametrize(("seconds", "text"), [(7, "0:07"), (754, "12:34"), (3723, "1:02:03")])
def test_durations_read_as_clocks(seconds, text):
    assert duration(seconds) == text
