"""The tests' run as a config file: --config=tests/tiny_run.py:DIRECTORY,MIXER."""

from pathlib import Path

from ml_collections import ConfigDict
from training import tiny_config


def get_config(arg: str) -> ConfigDict:
    directory, mixer = arg.rsplit(",", 1)
    config = tiny_config(Path(directory), mixer=mixer, steps=12)
    config.checkpoint.every = 3
    return config
