"""Folders in the form in which they are published, where transformers writes another one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MATRIX = re.compile(r"(.+\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")


def stack_experts(
    folder: Path, *, shards: bool = False, predictors: bool = False
) -> Path:
    """Store all experts of a layer in two arrays, as published folders of Qwen3.5 with experts do.

    Args:
        shards: write an index, and each tensor into one of two files.
        predictors: add weights of multi-token prediction.
    """
    file = folder / "model.safetensors"
    stored: dict[str, torch.Tensor] = {}
    matrices: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, tensor in load_file(file).items():
        if (matrix := MATRIX.fullmatch(name)) is None:
            stored[name] = tensor
        else:
            block, number, part = matrix.groups()
            matrices.setdefault(block, {})[int(number), part] = tensor
    for block, found in matrices.items():
        experts = range(len(found) // 3)
        stored[f"{block}gate_up_proj"] = torch.stack(
            [torch.cat([found[n, "gate"], found[n, "up"]]) for n in experts]
        )
        stored[f"{block}down_proj"] = torch.stack([found[n, "down"] for n in experts])
    assert matrices, f"{folder} has no experts"
    if predictors:
        stored["mtp.fc.weight"] = torch.ones(2)
        stored["mtp.layers.0.mlp.experts.down_proj"] = torch.ones(2, 3, 4)
    if not shards:
        save_file(stored, file, {"format": "pt"})
        return folder
    file.unlink()
    names = sorted(stored)
    weight_map = {
        name: f"part{place % 2}.safetensors" for place, name in enumerate(names)
    }
    for part in sorted(set(weight_map.values())):
        held = {name: stored[name] for name in names if weight_map[name] == part}
        save_file(held, folder / part, {"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
