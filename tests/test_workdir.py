"""Which directories a run may be in, and what it may change when it continues."""

import json

import pytest
from ml_collections import ConfigDict

from ccq_jax.config import default, resolve
from ccq_jax.workdir import CHECKPOINTS, WorkdirError, open_run, read_config


def config(**changes):
    made = resolve(default(), 257)
    made.update_from_flattened_dict(changes)
    return made


@pytest.fixture
def run(tmp_path):
    """The directory of a run at step 100."""
    with open_run(tmp_path / "run", config()) as path:
        (path / CHECKPOINTS / "100").mkdir(parents=True)
    return tmp_path / "run"


def test_a_run_starts_in_a_new_directory_and_writes_its_config(tmp_path):
    with open_run(tmp_path / "a" / "b", config()) as path:
        assert ConfigDict(read_config(path)).to_json() == config().to_json()


@pytest.mark.parametrize("name", ["notes.txt", "config.json"])
def test_a_directory_that_holds_something_else_is_refused_and_left_alone(tmp_path, name):
    (tmp_path / name).write_text(json.dumps({"architectures": ["Other"]}))
    with (
        pytest.raises(WorkdirError, match=f"not a run of this program.*{name}"),
        open_run(tmp_path, config()),
    ):
        pass
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(WorkdirError, match="is a file"), open_run(tmp_path / "file", config()):
        pass


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model.hidden_size", 256),
        ("model.ccq.enabled", True),
        ("data.source", "mqar"),
        ("train.batch_size", 16),
        ("train.learning_rate", 1e-4),
        ("seed", 1),
    ],
)
def test_another_configuration_is_refused_by_the_name_of_its_field(run, field, value):
    before = (run / "config.json").read_text()
    with (
        pytest.raises(WorkdirError, match=rf"{field}: was .*, now {value!r}"),
        open_run(run, config(**{field: value})),
    ):
        pass
    assert (run / "config.json").read_text() == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("train.steps", 100),
        ("train.steps", 5000),
        ("train.log_every", 1),
        ("train.accumulation", 2),
        ("checkpoint.keep", 5),
        ("eval.contexts", (64,)),
        ("mesh.fsdp", 8),
        ("model.remat", "full"),
        ("data.workers", 2),
    ],
)
def test_what_does_not_change_the_run_may_change(run, field, value):
    with open_run(run, config(**{field: value})) as path:
        section, name = field.split(".")
        assert read_config(path)[section][name] == (list(value) if name == "contexts" else value)


def test_fewer_steps_than_were_taken_are_refused(run):
    with (
        pytest.raises(WorkdirError, match=r"train\.steps is 99.*is at step 100"),
        open_run(run, config(**{"train.steps": 99})),
    ):
        pass


def test_a_run_without_checkpoints_may_change_altogether(tmp_path):
    with open_run(tmp_path, config()):
        pass
    with open_run(tmp_path, config(seed=1)) as path:
        assert read_config(path)["seed"] == 1


def test_one_process_trains_in_a_directory_at_a_time(tmp_path):
    claim = lambda: open_run(tmp_path, config())
    with claim(), pytest.raises(WorkdirError, match="another process is training"), claim():
        pass
    with claim():
        pass
