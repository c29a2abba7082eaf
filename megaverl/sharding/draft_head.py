"""EAGLE-3 head of a speculative decoder: its dimensions, read from the config.json of its folder.

The head (arXiv 2503.01840) is one decoder layer that reads hidden states of the target
model, which it is named after here as in vLLM. Layer numbers count as in vLLM and in
transformers' `hidden_states`: number n is the state after n layers, 0 the embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaverl.errors import ModelError
from megaverl.outside import read_json_file

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
# Variants of the head that vLLM reads from config.json, and what each would change.
VARIANTS = {
    "norm_before_residual": "the residual follows the norm",
    "norm_before_fc": "a norm precedes fc",
    "fc_norm": "each hidden state has a norm",
    "norm_output": "the next draft reads normed states",
    "attention_bias": "attention has biases",
    "mlp_bias": "the MLP has biases",
}


@dataclass(frozen=True)
class HeadSpec:
    """Dimensions of an EAGLE-3 head.

    Attributes:
        aux_layers: numbers of the target's hidden states that the head reads, ascending.
        hidden_size: of the head and of the target.
        vocab_size: of both.
    """

    aux_layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int

    @classmethod
    def from_folder(cls, folder: str | Path) -> HeadSpec:
        """Read `folder/config.json`.

        Raises:
            ModelError: the file cannot be read, or describes no head that can be trained. Names what is wrong.
        """
        path = Path(folder) / "config.json"
        try:
            config = read_json_file(path)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: {error}") from error
        return cls.from_config(config, str(path))

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], source: str = "config.json"
    ) -> HeadSpec:
        """Return the spec of a `config.json` given as a dictionary. Errors are those of `from_folder`."""
        if not isinstance(config, Mapping) or not is_head(config.get("architectures")):
            raise ModelError(
                f"{source}: expected the architecture {' or '.join(ARCHITECTURES)}. `megaverl draft-head` writes one."
            )
        try:
            size, vocab = int(config["hidden_size"]), int(config["vocab_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"{source}: hidden_size and vocab_size are needed: {error}."
            ) from error
        nested = config.get("eagle_config") or {}
        layers = config.get(AUX_LAYERS) or nested.get(AUX_LAYERS)
        if (
            not isinstance(layers, list)
            or not all(isinstance(number, int) and number >= 0 for number in layers)
            or sorted(set(layers)) != layers
        ):
            raise ModelError(
                f"{source}: {AUX_LAYERS} is {layers!r}. List the target's layers that the head reads, ascending and "
                "each once, such as [2, 14, 25]."
            )
        problems = [
            f"{name} is set ({meaning})"
            for name, meaning in VARIANTS.items()
            if config.get(name) or nested.get(name)
        ]
        if not nested.get("use_aux_hidden_state", True):
            problems.append("use_aux_hidden_state is false")
        if (count := config.get("num_hidden_layers")) != 1:
            problems.append(f"num_hidden_layers is {count}")
        drafted = config.get("draft_vocab_size")
        if drafted is not None and drafted != vocab:
            problems.append(
                f"draft_vocab_size is {drafted} (a reduced vocabulary, of {vocab} tokens)"
            )
        target_size = config.get("target_hidden_size")
        if target_size is not None and target_size != size:
            problems.append(
                f"target_hidden_size is {target_size}, and the head reads the target's embeddings of size {size}"
            )
        if problems:
            raise ModelError(
                f"{source}: such a head cannot be trained: {'; '.join(problems)}. Make one with `megaverl draft-head`, "
                "or leave draft.train out."
            )
        return cls(tuple(layers), size, vocab)


def is_head(architectures: Any) -> bool:
    """Return whether a config.json's `architectures` name an EAGLE-3 head."""
    return (
        isinstance(architectures, list)
        and bool(architectures)
        and architectures[0] in ARCHITECTURES
    )


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Return the hidden states that a new head reads: vLLM's default, or the last ones of a shallow target."""
    low, middle, high = 2, num_layers // 2, num_layers - 3
    if low < middle < high:
        return low, middle, high
    return tuple(range(max(0, num_layers - 2), num_layers + 1))
