"""The benchmark's records."""

import json

import pytest

from kernels import bench, curves, peers, shapes


def test_one_record_an_implementation(capsys):
    assert (
        bench.main(
            ["--op=gated_delta_rule", "--implementation=xla,scan", "--shape=token", "--repeats=2"]
        )
        == 0
    )
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [x["implementation"] for x in records] == ["xla", "scan"]
    for record in records:
        assert record["sizes"]["length"] == 1
        for part in ("forward", "forward_backward"):
            assert record[f"{part}_ms"] > 0
            assert record[f"{part}_peak_mib"] >= 0
        assert record["device"] and record["versions"]["jax"]


@pytest.mark.parametrize(
    "operator, gflop, gigabytes", [("ccq_query", 64.4, 0.3), ("gated_delta_rule", 180, 0.6)]
)
def test_work_at_the_size_that_is_trained(operator, gflop, gigabytes):
    shape = shapes.SHAPES["gdn1.3B"]
    one = shape._replace(batch=1, length=64)
    inputs = shapes.make_inputs(operator, one, dtype="bfloat16", initial_state=False)
    operations, moved = bench.work(operator, one, inputs)["forward"]
    tokens = shape.batch * shape.length / 64
    state = shape.heads * 256 * (256 if operator == "ccq_query" else 512) * 4
    assert operations * tokens / 1e9 == pytest.approx(gflop, rel=0.01)
    assert (moved - state) * tokens / 1e9 == pytest.approx(gigabytes, rel=0.05)


def test_help_teaches_the_shapes_and_figures(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    printed = capsys.readouterr().out
    assert "gdn1.3B" in printed and "forward_backward_ms" in printed and "--peers" in printed


def test_a_peer_that_is_not_installed_is_reported(capsys):
    if peers.unavailable() is None:
        pytest.skip("flash-linear-attention is installed here, so nothing is missing")
    assert peers.main(["gated_delta_rule", "token", "bfloat16"]) == 1
    assert json.loads(capsys.readouterr().out)["unavailable"]


def test_curves_cross_where_the_ratio_of_times_is_one():
    def records(mixer, *ms):
        lengths = 1024, 4096, 16384
        return [
            {"mixer": mixer, "batch": 1, "length": n, "forward_ms": x}
            for n, x in zip(lengths, ms, strict=True)
        ]

    softmax = records("softmax attention", 1.0, 4.0, 64.0)
    assert curves.crossing(softmax + records("a", 2.0, 8.0, 32.0), "a", "forward") == 8192
    assert curves.crossing(softmax + records("a", 9.0, 9.0, 90.0), "a", "forward") is None


def test_curves_measure_one_sequence_and_full_batches(capsys, tmp_path):
    plot = tmp_path / "curves.png"
    arguments = ["--lengths=16,32", "--heads=1", "--width=8", f"--out={plot}"]
    assert curves.main(arguments) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    measured = [(x["batch"], x["length"]) for x in records if x.get("mixer") == "softmax attention"]
    assert measured == [(1, 16), (1, 32), (2, 16)]
    assert plot.stat().st_size > 0
