"""The benchmark's records."""

import json

import pytest

from kernels import bench, peers, shapes


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
        pytest.skip("it is installed")
    assert peers.main(["gated_delta_rule", "token", "bfloat16"]) == 1
    assert json.loads(capsys.readouterr().out)["unavailable"]
