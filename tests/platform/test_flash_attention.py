"""Whether FlashAttention counts as available: packages that are really imported, devices as numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megaverl.distributed.grid import GridShape
from megaverl.errors import ConfigError, ModelError
from megaverl.models.hf_model import build_module
from megaverl.models.options import transformer_config
from megaverl.models.tiny import make_tiny_folder
from megaverl.platform import flash_attention
from megaverl.utils import is_flash_attn_available
from tests.sharding.specs import make_spec

HOPPER = (9, 0)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a module `flash_attn` is found."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    yield tmp_path / "flash_attn.py"
    sys.modules.pop("flash_attn", None)


@pytest.mark.parametrize(
    ("source", "capability", "words"),
    [
        ("__version__ = '2.5.0'", HOPPER, ""),
        ("__version__ = '2.8.3.post1'", (8, 0), ""),
        ("__version__ = '2.10.0'", (12, 0), ""),
        (
            "__version__ = '2.4.2'",
            HOPPER,
            "2.5 or later is needed, and 2.4.2 is installed",
        ),
        ("__version__ = '1.9'", HOPPER, "2.5 or later is needed, and 1.9"),
        ("", HOPPER, "2.5 or later is needed, and unknown is installed"),
        (
            "import flash_attn_2_cuda",
            HOPPER,
            "ModuleNotFoundError: No module named 'flash_attn_2_cuda'",
        ),
        (
            "raise OSError('undefined symbol: _ZN3c104')",
            HOPPER,
            "cannot be imported: OSError: undefined symbol",
        ),
        (
            "__version__ = '2.8.3'",
            (7, 5),
            "compute capability 8.0 or more, and this one has 7.5",
        ),
        ("__version__ = '2.8.3'", None, "there is no CUDA device"),
        (
            None,
            HOPPER,
            "cannot be imported: ModuleNotFoundError: No module named 'flash_attn'",
        ),
    ],
)
def test_it_imports_in_a_version_that_serves_on_a_device_that_can(
    package: Path, source: str | None, capability: tuple[int, int] | None, words: str
) -> None:
    if source is not None:
        package.write_text(source, encoding="utf-8")
    found = flash_attention.reason(capability)
    assert words in found and bool(words) == bool(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_a_folder_of_that_name_is_not_enough(package: Path) -> None:
    package.write_text("__version__ = '2.8.3'", encoding="utf-8")
    assert not is_flash_attn_available()


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
@pytest.mark.parametrize("backend", ["flash", "fused"])
def test_a_backend_that_is_not_there_is_refused(backend: str) -> None:
    with pytest.raises(
        ModelError,
        match=f"megatron.attention_backend={backend} needs .*Transformer Engine.* auto",
    ):
        transformer_config(
            make_spec(), GridShape(), torch.float32, {"attention_backend": backend}
        )
    transformer_config(
        make_spec(), GridShape(), torch.float32, {"attention_backend": "auto"}
    )


def test_a_model_of_transformers_that_cannot_keeps_its_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        make_tiny_folder(tmp_path), dtype=torch.bfloat16
    )
    asked = []
    monkeypatch.setattr(model, "set_attn_implementation", asked.append)
    flash_attention.use_in(model)
    assert asked == ([] if flash_attention.why_not() else ["flash_attention_2"])
    monkeypatch.undo()
    monkeypatch.setattr(flash_attention, "why_not", lambda: "")
    flash_attention.use_in(model.float())
    assert model.config._attn_implementation == "sdpa", "it computes in 16 bits alone"
    flash_attention.use_in(model.bfloat16())  # on the CPU
    assert model.config._attn_implementation == "sdpa"


def test_a_model_of_transformers_whose_scores_are_capped_leaves_sdpa(
    tmp_path: Path,
) -> None:
    """sdpa, transformers' own choice, computes another model: it leaves the cap out."""
    from transformers import AutoModelForCausalLM

    folder = make_tiny_folder(tmp_path, "Gemma2ForCausalLM", initializer_range=0.3)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        without = model(tokens).logits
        flash_attention.use_in(model)
        capped = model(tokens).logits
    assert model.config._attn_implementation == "eager"
    assert (capped - without).abs().max() > 1e-3
    with pytest.raises(
        ConfigError, match="leaves out the soft cap on scores of gemma2"
    ):
        build_module(folder, dtype=torch.float32, seed=None, attention="sdpa")
