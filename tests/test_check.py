"""The accuracy table."""

import json

import pytest

from kernels import check

FAST = ["--op=gated_linear_attention", "--implementation=scan", "--shapes=token"]


def test_prints_every_tensor_and_succeeds(capsys):
    assert check.main([*FAST, "--dtype=float32,bfloat16", "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    tensors = {"out", "state", "dq", "dk", "dv", "dlog_decay", "dinitial_state", "bits again"}
    assert {x["tensor"] for x in records if x["dtype"] == "bfloat16"} == tensors
    assert all(0 <= x["error"] <= x["tolerance"] for x in records)


def test_fails_where_an_error_exceeds_its_tolerance(capsys, monkeypatch):
    monkeypatch.setattr(check, "tolerance", lambda tensor, dtype: 1e-12)
    assert check.main([*FAST, "--dtype=float32"]) == 1
    printed = capsys.readouterr()
    assert "EXCEEDS 1e-12" in printed.out
    assert "exceed their tolerance" in printed.err


def test_tolerances_are_those_of_the_design():
    assert check.tolerance("out", "float32") == check.tolerance("state.count", "float32") == 1e-5
    assert check.tolerance("dlog_decay", "float32") == 1e-4
    assert check.tolerance("state", "bfloat16") == 5e-3
    assert check.tolerance("dlam", "bfloat16") == 8e-3
    assert check.tolerance("dlog_decay", "bfloat16") == check.tolerance("dbeta", "bfloat16") == 2e-2


def test_an_error_that_is_not_finite_is_infinite():
    assert check.relative_error([1.0, float("nan")], [1.0, 1.0]) == float("inf")
    assert check.relative_error([1.0, 2.0], [1.0, 1.0]) == pytest.approx(0.5**0.5)


@pytest.mark.parametrize("flag", ["--op=gdn", "--shapes=huge", "--dtype=int8"])
def test_an_unknown_name_is_refused(flag, capsys):
    with pytest.raises(SystemExit):
        check.main([flag])
    assert "is unknown; expected some of" in capsys.readouterr().err


def test_a_named_implementation_that_cannot_run_is_refused():
    with pytest.raises(RuntimeError, match="'pallas' cannot run here"):
        check.main(["--op=ccq_query", "--implementation=pallas"])
