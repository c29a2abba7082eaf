"""Head of a speculative decoder: its kind and dimensions, read from the config.json of its folder.

A head is one decoder layer that reads hidden states of the target model, which it is
named after here as in vLLM. Layer numbers count as in vLLM and in transformers'
`hidden_states`: number n is the state after n layers, 0 the embeddings. There are two
kinds, named as vLLM's methods:

- `eagle3` (arXiv 2503.01840) reads the states after three layers and has its own output layer.
- `mtp` (multi-token prediction, arXiv 2412.19437) reads the state after the target's last norm, and uses the target's
  output layer. vLLM builds it from the target's config.json (0.32: `MiMoMTP`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megaverl.errors import ModelError
from megaverl.outside import read_json_file
from megaverl.sharding.model_spec import ModelSpec

Method = Literal["eagle3", "mtp"]
EAGLE3: Method = "eagle3"
MTP: Method = "mtp"
HEAD_METHODS = (EAGLE3, MTP)
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
# vLLM builds `MiMoMTP` for a draft of this architecture, which is also that of the whole
# model. The folder of a head describes one layer.
MTP_ARCHITECTURE = "MiMoForCausalLM"
NUM_MTP_LAYERS = "num_nextn_predict_layers"
# Stands for the state after the target's last norm among the numbers of layers.
AFTER_LAST_NORM = -1
# Targets whose model vLLM runs up to its last norm, with attention over the whole row and
# rotary embeddings over whole heads.
MTP_TARGETS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Dimensions that vLLM takes from the target's config.json.
OF_TARGET = (
    "hidden_size",
    "ffn_hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "norm_eps",
    "rope_theta",
    "rope_scaling",
)
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
    """Dimensions of a head.

    Attributes:
        aux_layers: numbers of the target's hidden states that the head reads, ascending; `AFTER_LAST_NORM` of an MTP
            head.
        hidden_size: of the head and of the target.
        vocab_size: of both.
        method: kind of the head, vLLM's `speculative_config.method`.
        layer: dimensions of an MTP head's decoder layer.
    """

    aux_layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    method: Method = EAGLE3
    layer: ModelSpec | None = None

    @classmethod
    def from_folder(cls, folder: str | Path) -> HeadSpec:
        """Read `folder/config.json`.

        Raises:
            ModelError: the file cannot be read, or describes no head that can be trained. Names what is wrong.
        """
        path = Path(folder) / "config.json"
        try:
            config = read_json_file(path)
        except FileNotFoundError as error:
            raise ModelError(
                f"{path}: not found. Name the folder of a head, which `megaverl draft-head` makes."
            ) from error
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: {error}") from error
        return cls.from_config(config, str(path))

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], source: str = "config.json"
    ) -> HeadSpec:
        """Return the spec of a `config.json` given as a dictionary. Errors are those of `from_folder`."""
        method = head_method(config)
        if method is None:
            raise ModelError(
                f"{source}: expected the architecture {' or '.join(ARCHITECTURES)}, or {MTP_ARCHITECTURE} with one "
                f"layer. `megaverl draft-head` writes one. (A whole model with {NUM_MTP_LAYERS} is no head.)"
            )
        try:
            size, vocab = int(config["hidden_size"]), int(config["vocab_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"{source}: hidden_size and vocab_size are needed: {error}."
            ) from error
        if method == MTP:
            layer = _mtp_layer(config, source)
            return cls((AFTER_LAST_NORM,), size, vocab, method, layer)
        return cls(_aux_layers(config, source, size, vocab), size, vocab)


def _mtp_layer(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Return the dimensions of an MTP head's decoder layer."""
    if (count := config.get(NUM_MTP_LAYERS)) != 1:
        raise ModelError(
            f"{source}: {NUM_MTP_LAYERS} is {count}: heads of one layer can be trained, which proposes all drafts. "
            "Make one with `megaverl draft-head --kind mtp`, or leave draft.train out."
        )
    # The layer is one of Llama's, whose config.json a head has.
    like_llama = {**config, "architectures": ["LlamaForCausalLM"]}
    return ModelSpec.from_config(like_llama, source)


def _aux_layers(
    config: Mapping[str, Any], source: str, size: int, vocab: int
) -> tuple[int, ...]:
    """Return the layers that an EAGLE-3 head reads. Refuses variants that cannot be trained."""
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
    return tuple(layers)


def head_method(config: Any) -> Method | None:
    """Return vLLM's method for the head that a config.json describes, or None if it describes no head."""
    architectures = config.get("architectures") if isinstance(config, Mapping) else None
    if not isinstance(architectures, list) or not architectures:
        return None
    if architectures[0] in ARCHITECTURES:
        return EAGLE3
    is_one_layer = config.get("num_hidden_layers") == 1
    return MTP if architectures[0] == MTP_ARCHITECTURE and is_one_layer else None


def why_no_mtp(target: ModelSpec) -> str:
    """Return why a model cannot have an MTP head in vLLM that is trained here, or an empty string.

    The text follows the model's name.
    """
    if target.architecture not in MTP_TARGETS:
        return f"is a {target.architecture}, and MTP heads are trained for {', '.join(MTP_TARGETS)}"
    if not target.is_tabled:
        # Dimensions of an outline are not exact.
        return "has a config.json that cannot be read in full (`megaverl models FOLDER` says why)"
    if target.sliding_window is not None:
        return "has a sliding window, and MTP heads are trained on whole rows"
    if target.head_dim * target.num_heads != target.hidden_size:
        # Qwen2's attention, which vLLM's head has, reads no head_dim.
        return (
            f"has {target.num_heads} heads of {target.head_dim} dimensions, and vLLM gives the MTP head of a model "
            f"with hidden_size {target.hidden_size} heads of {target.hidden_size // target.num_heads}"
        )
    return ""


def misfits_target(head: HeadSpec, target: ModelSpec) -> list[str]:
    """List dimensions of an MTP head's layer that differ from the target's, from which vLLM takes them."""
    if head.layer is None:
        return []
    return [
        f"{name} {getattr(head.layer, name)} and not {getattr(target, name)}"
        for name in OF_TARGET
        if getattr(head.layer, name) != getattr(target, name)
    ]


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Return the hidden states that a new EAGLE-3 head reads: vLLM's default, or the last ones of a shallow target."""
    low, middle, high = 2, num_layers // 2, num_layers - 3
    if low < middle < high:
        return low, middle, high
    return tuple(range(max(0, num_layers - 2), num_layers + 1))
