"""Runs beside each other: what is paired, what is tested, what the tables say."""

import csv
import json

import numpy as np
import pytest

from ccq_jax import compare
from ccq_jax.evaluation import statistics
from ccq_jax.evaluation.statistics import Examples


def examples(values, weights=None):
    return Examples.read({"values": list(values)} | ({"weights": weights} if weights else {}))


def write_run(folder, results, **found):
    (folder / "eval").mkdir(parents=True)
    (folder / "eval" / "part.json").write_text(json.dumps({"results": results, "examples": found}))
    return folder


def test_an_interval_of_a_share_is_never_a_point():
    low, high = statistics.interval(examples([0] * 64))
    assert low == 0 and high == pytest.approx(1 - 0.025 ** (1 / 64))  # Clopper and Pearson
    low, high = statistics.interval(examples([0, 100] * 50))  # in %
    assert 38 < low < 41 and 59 < high < 62


def test_intervals_cover_the_mean_as_often_as_they_say():
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(60):
        weights = rng.integers(1, 9, 80)
        values = rng.exponential(2.0, 80)
        low, high = statistics.interval(examples(values, weights.tolist()), seed)
        covered += low <= 2.0 <= high
    assert 50 <= covered <= 60


def test_intervals_of_few_examples_cover_the_mean_as_well():
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(400):
        low, high = statistics.interval(examples(rng.normal(2, 1, 4)))
        covered += low <= 2 <= high
    assert 365 <= covered <= 395  # 95 %; a bootstrap of four covers some 80 %


def test_weights_count_in_the_mean():
    assert examples([1.0, 4.0], [3, 1]).mean == pytest.approx(1.75)


def test_pairs_find_a_small_difference_that_the_figures_alone_hide():
    rng = np.random.default_rng(1)
    first = rng.normal(3, 1, 100)
    second = first - 0.05 + rng.normal(0, 0.05, 100)
    found = statistics.difference(examples(first), examples(second))
    assert found.p < 0.001 and found.interval.high < 0
    assert found.mean == pytest.approx((second - first).mean())
    wide = statistics.interval(examples(first))
    assert wide.high - wide.low > 5 * (found.interval.high - found.interval.low)


def test_chance_is_seldom_called_a_difference():
    rng = np.random.default_rng(2)
    p = [
        statistics.difference(examples(rng.random(40) < 0.5), examples(rng.random(40) < 0.5)).p
        for _ in range(60)
    ]
    assert sum(x < 0.05 for x in p) <= 8
    assert statistics.difference(examples([0, 1, 1]), examples([0, 1, 1])).p == 1


@pytest.mark.parametrize(
    "found", [{"values": []}, {"values": [1, 2], "weights": [1]}, {"values": [1], "weights": [0]}]
)
def test_examples_that_cannot_be_are_refused(found):
    with pytest.raises(ValueError, match="examples have"):
        Examples.read(found)


def test_only_the_same_examples_are_paired():
    with pytest.raises(ValueError, match="same examples"):
        statistics.difference(examples([1, 2]), examples([1, 2, 3]))
    with pytest.raises(ValueError, match="same examples"):
        statistics.difference(examples([1, 2], [1, 1]), examples([1, 2], [1, 2]))


@pytest.fixture
def runs(tmp_path):
    losses = np.linspace(1, 2, 30)
    better = (losses - 0.1).tolist()
    weights = list(range(1, 31))
    return [
        write_run(
            tmp_path / "base",
            {"loss": 1.6, "tasks": {"mqar": {"acc": 0.5}}, "only_here": 1, "flag": True},
            loss={"values": losses.tolist(), "weights": weights},
            **{"tasks/mqar/acc": {"values": [0, 1] * 8}},
        ),
        write_run(
            tmp_path / "new",
            {"loss": 1.5, "tasks": {"mqar": {"acc": 0.5}}},
            loss={"values": better, "weights": weights},
            **{"tasks/mqar/acc": {"values": [0, 1] * 4}},
        ),
    ]


def test_figures_are_compared_where_examples_agree(runs):
    rows = compare.compare([compare.read_run(run) for run in runs])
    assert set(rows) == {"part/loss", "part/tasks/mqar/acc"}
    first, second = rows["part/loss"]
    assert first.difference is None
    assert second.difference.mean == pytest.approx(-0.1) and second.q <= 0.05
    assert rows["part/tasks/mqar/acc"][1].difference is None  # not as many examples
    assert rows["part/tasks/mqar/acc"][1].interval is not None


def test_the_command_writes_tables_and_a_picture(runs, tmp_path, capsys):
    out = tmp_path / "out"
    assert compare.main([*map(str, runs), f"--out={out}"]) == 0
    assert "part/loss" in capsys.readouterr().out
    assert {p.name for p in out.iterdir()} == {
        f"comparison.{x}" for x in ("md", "csv", "json", "png")
    }
    with (out / "comparison.csv").open() as file:
        head, *lines = csv.reader(file)
    assert head[0] == "figure" and len(lines) == 2
    assert lines[0][3].startswith("-0.1 [") and "q=" in lines[0][3]
    assert (
        json.loads((out / "comparison.json").read_text())["part/loss"][str(runs[1])]["value"] == 1.5
    )


def test_seeds_of_a_model_are_joined_and_paired_by_seed(tmp_path, capsys):
    for seed, (base, gain) in {3: (0.2, 0.11), 7: (0.6, 0.09), 11: (0.4, 0.1)}.items():
        write_run(tmp_path / f"base-{seed}", {"accuracy": base, "only_base": 1})
        write_run(tmp_path / f"new-{seed}", {"accuracy": base + gain})
    folders = sorted(map(str, tmp_path.iterdir()))
    base, new = compare.join_seeds([compare.read_run(folder) for folder in folders])
    assert base.figures["part/accuracy"] == pytest.approx(0.4)
    (row,) = compare.compare([base, new]).values()
    assert row[1].difference.mean == pytest.approx(0.1)
    low, high = row[1].difference.interval
    assert 0.05 < low < 0.09 and 0.11 < high < 0.15  # Student's: 0.1 +- 4.3 * 0.01 / sqrt(3)
    assert row[1].difference.p == pytest.approx(0.25)  # 2 of 8 signs
    assert compare.main([*folders, "--seeds", f"--out={tmp_path / 'out'}"]) == 0
    assert (tmp_path / "out" / "comparison.png").is_file()
    with pytest.raises(ValueError, match=r"seeds \[3, 7\], and not \[3, 7, 11\]"):
        compare.join_seeds([compare.read_run(x) for x in folders if not x.endswith("new-11")])
    assert compare.main([str(write_run(tmp_path / "plain", {})), "--seeds"]) == 1
    assert "plain does not end in a seed" in capsys.readouterr().err


def test_published_figures_stand_beside_those_of_the_same_name(tmp_path):
    run = compare.read_run(write_run(tmp_path / "run", {}))
    path = "lm/wikitext/word_perplexity"
    rows = compare.compare([run._replace(figures={path: 30.0})])
    assert compare.published(rows).rows[-1][1:3] == ["CCQ-GLA 1.3B", 16.92]


def test_what_is_no_evaluation_is_named(tmp_path, capsys):
    assert compare.main([str(tmp_path / "nothing")]) == 1
    assert "run eval.py" in capsys.readouterr().err
    folder = write_run(tmp_path / "bad", {})
    (folder / "eval" / "part.json").write_text("[]")
    assert compare.main([str(folder)]) == 1
    assert "part.json is not what eval.py writes" in capsys.readouterr().err
    good = write_run(tmp_path / "good", {"loss": 1.0})
    assert compare.main([str(good), "--figures=none"]) == 1
    assert "no figure matches 'none'" in capsys.readouterr().err
