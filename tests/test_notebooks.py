"""Notebooks run from their first cell to their last, and hold what they showed."""

import json
import pathlib

import matplotlib
import pytest

NOTEBOOKS = pathlib.Path(__file__).parents[1] / "notebooks"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in NOTEBOOKS.glob("*.ipynb")))
def test_every_cell_runs(name, monkeypatch):
    monkeypatch.chdir(NOTEBOOKS)
    matplotlib.use("Agg")
    cells = json.loads((NOTEBOOKS / name).read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert any(cell["outputs"] for cell in code)
    names: dict = {}
    for cell in code:
        exec(compile("".join(cell["source"]), name, "exec"), names)
