"""A model's own code that calls `exit()`: an error of that folder, wherever the code runs, and never a good end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megaverl.data.tokenizers import load_tokenizer
from megaverl.errors import DataError, MegaverlError, ModelError, RolloutError
from megaverl.models.hf_model import build_module, read_config
from megaverl.models.hf_shards import module_without_data
from megaverl.rollout.hf_engine import HFEngine
from tests.trainer.test_remote_code import CODE, CONFIG

LEAVES = "import sys; sys.exit(0)"
# Where the code leaves: a line of the file, after which it is put with the line's own
# indentation.
PLACES = {
    # The end of a signature of several lines.
    "configuration": ("configuration_plain.py", "    ):"),
    "module": ("modeling_plain.py", "    def __init__(self, config, layer_idx):"),
    "forward": (
        "modeling_plain.py",
        "    def forward(self, hidden, mask, cache, **more):",
    ),
}
SIZES = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1}


@pytest.fixture
def leaving(tmp_path: Path) -> Callable[[str], Path]:
    def make(place: str) -> Path:
        # transformers keeps a copy of the code by the folder's name
        folder = tmp_path / f"leaves_in_{place}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**CONFIG, **SIZES}))
        for file in CODE.glob("*.py"):
            shutil.copy(file, folder)
        name, line = PLACES[place]
        lines = (folder / name).read_text().splitlines()
        number = next(
            number for number, text in enumerate(lines) if text.startswith(line)
        )
        lines.insert(number + 1, f"        {LEAVES}")
        (folder / name).write_text("\n".join(lines))
        return folder

    return make


def load_rollout(folder: Path) -> None:
    HFEngine(folder, dtype=torch.float32, max_model_len=16, trust_remote_code=True)


@pytest.mark.parametrize(
    ("place", "load", "error"),
    [
        (
            "configuration",
            lambda folder: read_config(folder, trust_remote_code=True),
            ModelError,
        ),
        (
            "configuration",
            lambda folder: module_without_data(folder, trust_remote_code=True),
            ModelError,
        ),
        (
            "module",
            lambda folder: module_without_data(folder, trust_remote_code=True),
            ModelError,
        ),
        (
            "module",
            lambda folder: build_module(
                folder, dtype=torch.float32, seed=0, trust_remote_code=True
            ),
            ModelError,
        ),
        ("configuration", load_rollout, RolloutError),
        (
            "configuration",
            lambda folder: load_tokenizer(folder, trust_remote_code=True),
            DataError,
        ),
    ],
)
def test_code_that_leaves_is_an_error_of_its_folder(
    leaving: Callable[[str], Path],
    place: str,
    load: Callable[[Path], object],
    error: type[MegaverlError],
) -> None:
    folder = leaving(place)
    with pytest.raises(error, match="SystemExit: 0") as caught:
        load(folder)
    assert str(folder) in str(caught.value)


def test_a_forward_pass_that_leaves_is_one_that_cannot_be_packed(
    leaving: Callable[[str], Path],
) -> None:
    folder = leaving("forward")
    _, reading = build_module(
        folder, dtype=torch.float32, seed=None, trust_remote_code=True
    )
    assert (
        "does not run without data" in reading.padded_because
        and "SystemExit: 0" in reading.padded_because
    )
