"""Files from outside with absurd contents end in one error that names them."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from megaverl.data.time_limit import time_limit
from megaverl.errors import MegaverlError
from megaverl.sharding.model_spec import ModelSpec
from megaverl.weights.stored import read_header, read_weight_map

DEEP = "[" * 100_000 + "]" * 100_000
LONG = "9" * 5_000


def header(text: str, length: int | None = None) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded


@pytest.mark.parametrize(
    "content",
    [
        header(DEEP),
        header(
            json.dumps(
                {"a": {"dtype": "F32", "shape": [2**70], "data_offsets": [0, 4]}}
            )
        ),
        header(
            json.dumps({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}})
        ),
        header(
            json.dumps(
                {"a": {"dtype": "F32", "shape": [1] * 100_000, "data_offsets": [0, 4]}}
            )
        ),
        header(
            json.dumps(
                {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**70]}}
            )
        ),
        header(f'{{"a": {LONG}}}'),
        header("{}", 2**63),
        header("{}", 2**40),
        header("[]"),
        b"",
    ],
)
def test_a_safetensors_header(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(MegaverlError, match=r"model\.safetensors"):
        read_header(file)


@pytest.mark.parametrize(
    "content",
    [DEEP, LONG, '{"weight_map": ' + DEEP + "}", "\xff", '{"weight_map": 3}', "null"],
)
def test_an_index_and_a_config(tmp_path: Path, content: str) -> None:
    for name in ("model.safetensors.index.json", "config.json"):
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(MegaverlError, match=r"index\.json"):
        read_weight_map(tmp_path / "model.safetensors.index.json")
    with pytest.raises(MegaverlError, match=r"config\.json"):
        ModelSpec.from_folder(tmp_path)


def test_a_gguf_header(tmp_path: Path) -> None:
    gguf = pytest.importorskip("megaverl.checkpoint.convert.gguf")
    file = tmp_path / "model.gguf"
    for tensors, fields, tail in (
        (2**60, 0, b""),
        (0, 2**60, b""),
        (1, 1, struct.pack("<Q", 2**62) + b"a" * 64),
    ):
        file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + tail)
        with pytest.raises(MegaverlError, match=r"model\.gguf"):
            gguf.open_gguf(file)


def test_code_that_does_not_end_is_interrupted() -> None:
    with (
        pytest.raises(TimeoutError, match=r"not finished after 0\.05 s"),
        time_limit(0.05),
    ):
        while True:
            pass


def test_an_older_python_is_told_which_one_is_needed() -> None:
    older = "import sys; sys.version_info = (3, 10, 14, 'final', 0); sys.argv = {argv}; import megaverl"
    for argv, traceback in ((["-m"], False), (["program.py"], True)):
        done = subprocess.run(
            [sys.executable, "-c", older.format(argv=argv)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1
        assert (
            "megaverl needs Python 3.11 or 3.12; this is Python 3.10"
            in done.stderr.splitlines()[-1]
        )
        assert ("Traceback" in done.stderr) is traceback
