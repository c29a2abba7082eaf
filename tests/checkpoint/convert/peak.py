"""What tests/checkpoint/convert/test_command.py measures in a process of its own: memory of a conversion."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch

from megaverl.models.architectures import weights_of
from megaverl.sharding.model_spec import ModelSpec
from megaverl.weights.safetensors_writer import FolderWriter
from tests.checkpoint.convert.folders import converted, make_model


def make_large(folder: Path, num_layers: int, shard_bytes: int) -> int:
    """A model of some size, without transformers; returns its bytes."""
    small = make_model(
        folder,
        num_hidden_layers=1,
        hidden_size=512,
        intermediate_size=2048,
        dtype="bfloat16",
    )
    config = json.loads((small / "config.json").read_text()) | {
        "num_hidden_layers": num_layers
    }
    config.pop("layer_types", None)  # one entry for each layer
    (small / "config.json").write_text(json.dumps(config))
    (small / "model.safetensors").unlink()
    weights = weights_of(ModelSpec.from_folder(small))
    with FolderWriter(
        small, weights, torch.bfloat16, shard_bytes, writes=True
    ) as writer:
        for number, weight in enumerate(weights):
            writer.write([torch.full(weight.shape, number, dtype=torch.bfloat16)])
        assert writer.finish() is None
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def peak_growth(work: Callable[[], object]) -> int:
    """Bytes by which this process's resident memory grew at most during `work`."""

    def status(key: str) -> int:
        return (
            int(
                re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[
                    1
                ]
            )
            * 1024
        )  # type: ignore[index]

    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def growths(folder: str, shard_bytes: int) -> dict[str, int]:
    """By step of a conversion there and back."""
    root = Path(folder)
    assert make_large(root / "hf", 28, shard_bytes) > 10 * shard_bytes
    # what is imported only then
    warm = converted(
        make_model(root / "warm"), root / "warm_up", "megatron", verify=True
    )
    converted(warm, root / "warm_back", "hugging_face", verify=True)
    steps = {
        "there": lambda: converted(
            root / "hf", root / "there", "megatron", grid={"tp": 2}, verify=True
        ),
        "on": lambda: converted(
            root / "there", root / "on", "megatron", grid={"tp": 4, "pp": 2}
        ),
        "back": lambda: converted(
            root / "on", root / "back", "hugging_face", verify=True
        ),
    }
    return {name: peak_growth(step) for name, step in steps.items()}
