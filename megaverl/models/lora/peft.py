"""Adapter folders as the `peft` library writes and reads them: adapter_config.json, adapter_model.safetensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megaverl.distributed.collectives import on_first_rank, together
from megaverl.errors import ModelError
from megaverl.models.lora.adapter_set import AdapterSet
from megaverl.models.lora.low_rank import ALL_LINEAR, PEFT_PREFIX
from megaverl.platform import platform
from megaverl.sharding.layout import EMPTY, whole_layout
from megaverl.sharding.plan import make_plan
from megaverl.weights.load import check_names, check_shapes, fill
from megaverl.weights.reshard import Resharder
from megaverl.weights.safetensors_writer import cannot_write, replace_folder
from megaverl.weights.stored import folder_layout, read_header, stored_arrays
from megaverl.weights.transfer import check_tensors

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# What this reads and writes is plain LoRA: these of peft's fields must say so.
PLAIN: dict[str, Any] = {
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "lora_bias": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}


def save_adapters(adapters: AdapterSet, folder: str | Path, *, base: str) -> None:
    """Write an adapter folder, which takes its name when it is whole. Every rank of the grid takes part.

    Args:
        base: the model that the adapter belongs to, as peft's `base_model_name_or_path`.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    group, rank, folder = adapters.grid.world, adapters.grid.rank, Path(folder)
    everything = whole_layout([(weight.name, weight.shape) for weight in adapters.weights])
    plan = make_plan(
        adapters.layout_of, lambda other: everything if other == 0 else EMPTY, adapters.grid.shape.world_size, rank
    )
    tensors = adapters.parameters
    dtype = next(iter(tensors.values())).dtype if tensors else torch.float32
    shapes = everything.local_shapes if rank == 0 else {}
    landed = {name: torch.empty(shape, dtype=dtype, device=platform.device) for name, shape in shapes.items()}
    Resharder(plan, tensors, landed, group).run()
    fields = {"peft_type": "LORA", **PLAIN, "inference_mode": True, "init_lora_weights": True}
    on_first_rank(lambda: _write(folder, fields | _own_fields(adapters, base), landed), group)


def _own_fields(adapters: AdapterSet, base: str) -> dict[str, Any]:
    """Those of peft's LoraConfig that this run decides."""
    lora = adapters.config
    targets: Any = lora.targets
    if targets == ALL_LINEAR:
        targets = sorted({low_rank.projection for low_rank in adapters.low_ranks.values()})
    return {
        "base_model_name_or_path": base,
        "task_type": "TOKEN_CLS" if adapters.trained else "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "modules_to_save": ["score"] if adapters.trained else None,
    }


def _write(folder: Path, fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    temporary = folder.with_name(folder.name + ".tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
        (temporary / CONFIG_FILE).write_text(text, encoding="utf-8")
        named = {_stored_name(name): tensor.cpu() for name, tensor in tensors.items()}
        save_file(named, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise cannot_write(folder, OSError(error)) from error
    replace_folder(temporary, folder)


def _stored_name(name: str) -> str:
    """Factors are called as peft calls them; a module that is trained whole gets peft's prefix."""
    return name if name.startswith(PEFT_PREFIX) else PEFT_PREFIX + name


def load_adapters(adapters: AdapterSet, folder: str | Path) -> None:
    """Fill a model's adapters from a peft folder, each rank its own parts. All ranks take part, and fail if one does.

    Raises:
        ModelError: no such folder, no plain LoRA, another rank or alpha, or adapters of other layers: names them all.
    """
    with together(adapters.grid.world):
        _load(adapters, Path(folder))


def _load(adapters: AdapterSet, folder: Path) -> None:
    config, lora, key = read_config(folder), adapters.config, f"{adapters.role}.lora"
    wrong = [f"{name} is {config[name]!r}" for name, plain in PLAIN.items() if (config.get(name) or plain) != plain]
    if config.get("peft_type") != "LORA" or wrong:
        what = "; ".join([f"peft_type is {config.get('peft_type')!r}", *wrong])
        raise ModelError(f"{folder / CONFIG_FILE}: {what}. Only plain LoRA adapters can be trained on.")
    if (found := (config.get("r"), config.get("lora_alpha"))) != (lora.rank, lora.alpha):
        raise ModelError(
            f"{folder / CONFIG_FILE}: r is {found[0]} and lora_alpha {found[1]}, this run has {key}.rank={lora.rank} "
            f"and {key}.alpha={lora.alpha:g}. Give the adapter's."
        )
    layout = adapters.layout_of(adapters.grid.rank)
    check_tensors(layout, adapters.parameters, "the model", ModelError)
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        raise ModelError(f"{file}: not found. An adapter folder has {CONFIG_FILE} and {WEIGHTS_FILE}.")
    names = {_stored_name(weight.name): weight.name for weight in adapters.weights}
    stored = {names.get(name, name): tensor for name, tensor in read_header(file).items()}
    try:
        check_names(folder, dict.fromkeys(stored, file.name), adapters.weights, ())
        check_shapes(folder, stored, adapters.weights)
    except ModelError as error:
        raise ModelError(f"{error}\n(It is an adapter: {key}.targets must name the same layers.)") from error
    fill(folder_layout(stored), stored_arrays(stored), layout, adapters.parameters)


def read_config(folder: Path) -> dict[str, Any]:
    """An adapter's configuration.

    Raises:
        ModelError: there is none, or it is damaged.
    """
    file = folder / CONFIG_FILE
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read ({error}). Name the folder of a peft adapter.") from error
    return config
