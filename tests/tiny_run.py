"""The tests' run as a config file: --config=tests/tiny_run.py:DIRECTORY."""

from pathlib import Path

from ml_collections import ConfigDict
from training import tiny_config


def get_config(directory: str) -> ConfigDict:
    config = tiny_config(Path(directory), steps=12)
    config.checkpoint.every = 3
    return config
