"""What the checker reads out of sources: here a small package that has what it asks for, then lacks some of it."""

from __future__ import annotations

from pathlib import Path

from tools.check_gpu_engine import LAYERS, RUNNERS, Sources, broken, missing

LINEAR = """
class UnquantizedLinearMethod:
    def process_weights_after_loading(self, layer):
        if current_platform.is_cpu():
            layer.weight.data = pack(layer.weight)
        elif self.packs:
            self._pack(layer)

    def _pack(self, layer):
        {on_cuda}
"""
RUNNER = """
class GPUModelRunner(Mixin):
    def __init__(self):
        {model}

    def load_model(self):
        pass

    def get_model(self):
        pass
"""


def sources(
    folder: Path, on_cuda: str = "pass", model: str = "self.model = None"
) -> Sources:
    files = {
        LAYERS + "linear.py": LINEAR.format(on_cuda=on_cuda),
        RUNNERS[1]: RUNNER.format(model=model),
    }
    for name, text in files.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Sources(folder)


def test_names_that_are_gone(tmp_path: Path) -> None:
    whole = "\n".join(missing(sources(tmp_path / "whole")))
    assert RUNNERS[1] not in whole
    assert f"vllm/{RUNNERS[0]} is gone; of it we use GPUModelRunner.load_model" in whole
    lacking = list(missing(sources(tmp_path / "lacking", model="self.module = None")))
    assert f"vllm/{RUNNERS[1]}: no GPUModelRunner.model" in lacking


def test_weights_that_change_on_cuda(tmp_path: Path) -> None:
    linear = [
        line
        for line in broken(sources(tmp_path / "kept"))
        if "UnquantizedLinearMethod" in line
    ]
    assert linear == [], "what a CPU does is another matter"
    packed = sources(
        tmp_path / "packed",
        on_cuda="replace_parameter(layer, 'weight', layer.weight.t())",
    )
    assert any(
        "UnquantizedLinearMethod changes weights on CUDA: replace_parameter" in line
        for line in broken(packed)
    )
    [change] = [
        change
        for change in packed.changes(LAYERS + "linear.py", "UnquantizedLinearMethod")
        if change.on_cuda
    ]
    assert change.line == 10
