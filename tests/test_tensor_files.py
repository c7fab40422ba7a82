"""Folders of safetensors files: what is written is read, and what was tampered with is refused."""

import json
import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from ccq_jax.tensor_files import INDEX, SINGLE, Planned, TensorFolder, write_tensors


def write(directory, tensors, **options):
    plan = [Planned(name, x.shape) for name, x in tensors.items()]
    write_tensors(directory, plan, tensors.values(), **options)


def read(directory):
    with TensorFolder(directory) as folder:
        return {name: np.array(folder.read(name)) for name in folder.entries}


def bits(x):
    return x.dtype, x.shape, np.ascontiguousarray(x).reshape(-1).view(np.uint8).tobytes()


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shapes=st.dictionaries(
        st.text('ab.0é"', min_size=1, max_size=8), shapes, min_size=1, max_size=6
    ),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    shard_bytes=st.sampled_from([1, 64, 300, 10**9]),
    seed=st.integers(0, 100),
)
def test_any_tensors_in_any_number_of_files_come_back_bit_for_bit(
    tmp_path_factory, shapes, dtype, shard_bytes, seed
):
    directory = tmp_path_factory.mktemp("folder")
    rng = np.random.default_rng(seed)
    kind = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
    tensors = {
        name: rng.integers(0, 2**32, shape, np.uint32).view(np.float32).astype(kind)
        for name, shape in shapes.items()
    }
    write(directory, tensors, dtype=dtype, shard_bytes=shard_bytes)
    found = read(directory)
    assert {name: bits(x) for name, x in found.items()} == {
        name: bits(x) for name, x in tensors.items()
    }
    files = sorted(p.name for p in directory.glob("*.safetensors"))
    assert (INDEX in [p.name for p in directory.iterdir()]) == (len(files) > 1)
    elsewhere = {}  # the format's own library reads the same
    for file in files:
        elsewhere |= load_file(directory / file)
    assert {name: bits(x) for name, x in elsewhere.items()} == {
        name: bits(x) for name, x in tensors.items()
    }


def test_a_smaller_model_leaves_nothing_of_a_larger_one(tmp_path):
    tensors = {f"t{i}": np.full(4, i, np.float32) for i in range(3)}
    write(tmp_path, tensors, shard_bytes=16)
    assert len(list(tmp_path.iterdir())) == 4
    write(tmp_path, {"t0": tensors["t0"]})
    assert [p.name for p in tmp_path.iterdir()] == [SINGLE]


@pytest.fixture
def sharded(tmp_path):
    """Three files of one tensor each, and their index."""
    write(tmp_path, {name: np.arange(8, dtype=np.float32) for name in "abc"}, shard_bytes=32)
    return tmp_path


def edit_index(directory, **files):
    path = directory / INDEX
    contents = json.loads(path.read_text())
    contents["weight_map"] |= files
    path.write_text(json.dumps(contents))


@pytest.mark.parametrize(
    "file",
    ["../secret.safetensors", "/etc/secret.safetensors", "..\\secret.safetensors",
     "sub/x.safetensors", "pytorch_model.bin", "C:x.safetensors", ""],
)  # fmt: skip
def test_an_index_cannot_lead_out_of_its_folder(sharded, file):
    save_file({"a": np.zeros(8, np.float32)}, sharded.parent / "secret.safetensors")
    edit_index(sharded, a=file)
    with pytest.raises(ValueError, match=r"must be a .safetensors file of the folder") as caught:
        TensorFolder(sharded)
    assert repr(file) in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', "{" * 10**5])
def test_an_index_that_is_none_is_refused(sharded, text):
    (sharded / INDEX).write_text(text)
    with pytest.raises(ValueError, match="is no index"):
        TensorFolder(sharded)


def test_files_and_index_must_name_the_same_tensors(sharded):
    save_file(
        {"b": np.zeros(1, np.float32), "x": np.zeros(1, np.float32)},
        sharded / "model-00003-of-00003.safetensors",
    )
    with pytest.raises(ValueError) as caught:
        TensorFolder(sharded)
    message = str(caught.value)
    assert "c is not in model-00003-of-00003.safetensors" in message
    assert "x in model-00003-of-00003.safetensors is not in" in message
    assert "b lies in two files" in message


def test_a_file_that_the_index_names_must_be_there(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00003"):
        TensorFolder(sharded)


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle ran')",)


def _as_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb()))


def _flip_header(path):
    data = bytearray(path.read_bytes())
    data[:8] = (2**62).to_bytes(8, "little")
    path.write_bytes(data)


def _overlap(path):
    path.write_bytes(path.read_bytes().replace(b"[0,32]", b"[4,32]"))


TAMPERED = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"12345"),
    "empty": lambda path: path.write_bytes(b""),
    "header too long": _flip_header,
    "offsets": _overlap,
    "pickle": lambda path: path.write_bytes(pickle.dumps(Bomb())),
    "zipped pickle": _as_zip,
}


@pytest.mark.parametrize("how", TAMPERED)
def test_a_file_that_was_tampered_with_is_refused(tmp_path, how):
    write(tmp_path, {"a": np.arange(8, dtype=np.float32)})
    TAMPERED[how](tmp_path / SINGLE)
    with pytest.raises(ValueError, match=r"model.safetensors is damaged or no safetensors file"):
        TensorFolder(tmp_path)


def test_a_pickle_alone_is_named_and_left_alone(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(FileNotFoundError, match=r"pytorch_model.bin is a pickle"):
        TensorFolder(tmp_path)
    with pytest.raises(FileNotFoundError, match="is no folder"):
        TensorFolder(tmp_path / "nowhere")
