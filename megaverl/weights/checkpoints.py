"""A distributed checkpoint as the source of a model's weights: which of its arrays they are, by name and shape."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaverl.errors import CheckpointError
from megaverl.sharding.dist_checkpoint import checkpoint_layout
from megaverl.sharding.layout import Layout
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.naming import as_block
from megaverl.sharding.plan import MAX_NAMED
from megaverl.sharding.weight import Weight
from megaverl.weights.stored import StoredArray
from megaverl.weights.torch_dist import IndexedArray, locate, read_index

EMBEDDING_KEY = "embedding.word_embeddings.weight"
HEAD_KEY = "output_layer.weight"
BESIDE_KEY = "value_head.weight"  # of a critic on the actor's backbone


@dataclass(frozen=True, eq=False)
class OpenedCheckpoint:
    """The index of a checkpoint, and what stands in front of the keys of the wanted model.

    Attributes:
        as_critic: of an actor that is its own critic, its backbone with the value head is wanted.
    """

    folder: Path
    index: Mapping[str, IndexedArray]
    prefix: str
    as_critic: bool = False

    @property
    def has_value_head(self) -> bool:
        """Whether the wanted model is a critic, with one value a position."""
        if self.as_critic:
            return self.index[self.prefix + BESIDE_KEY].shape[0] == 1
        head = self.index.get(self.prefix + HEAD_KEY)
        return head is not None and head.shape[0] == 1 < self.index[self.prefix + EMBEDDING_KEY].shape[0]

    def layout(self, weights: Sequence[Weight], spec: ModelSpec) -> Layout:
        """Where the weights lie in the arrays.

        Raises:
            CheckpointError: arrays that are missing, of another shape, or no weights of this model: names them all.
        """
        if self.as_critic:
            weights = [w._replace(megatron=BESIDE_KEY) if w.megatron == HEAD_KEY else w for w in weights]
        found = checkpoint_layout(
            weights,
            spec,
            padded_vocab_size=max(self.index[self.prefix + EMBEDDING_KEY].shape[0], spec.vocab_size),
            prefix=self.prefix,
            present=self.index.keys(),
        )
        self._check(found)
        return found

    def arrays(self, layout: Layout) -> dict[str, StoredArray]:
        """The arrays that the layout names, with the places of their elements."""
        return locate({name: self.index[name] for name in layout.local_shapes})

    def _check(self, layout: Layout) -> None:
        shapes = layout.local_shapes
        problems = [
            f"{key}: missing, expected with shape {list(shape)}"
            for key, shape in shapes.items()
            if key not in self.index
        ]
        problems += [
            f"{key}: shape {list(self.index[key].shape)}, expected {list(shape)}"
            for key, shape in shapes.items()
            if key in self.index and self.index[key].shape != shape
        ]
        parts = (f"{self.prefix}decoder.", f"{self.prefix}embedding.")
        problems += [
            f"{key}: not a weight of the model that config.json describes"
            for key in self.index
            if key.startswith(parts) and key not in shapes
        ]
        if problems:
            raise CheckpointError(
                f"{self.folder}: of another model than its config.json:{as_block(problems, MAX_NAMED)}"
                "\nTake the config.json of the model that was trained."
            )


def open_checkpoint(folder: Path, role: str | None = None) -> OpenedCheckpoint:
    """Read the index of a checkpoint, and find the model in it: `role`'s, or the only one, or the actor's.

    Raises:
        CheckpointError: as `read_index`; no model of that role, or several to choose from.
    """
    index = read_index(folder)
    found = [key.removesuffix(EMBEDDING_KEY) for key in index if key.endswith(EMBEDDING_KEY)]
    found = [prefix for prefix in found if "optimizer." not in prefix]
    if not found and any(".lora_" in key for key in index):
        raise CheckpointError(
            f"{folder}: holds adapters alone, of a run with `lora`. Take what the run exported: hf is the merged "
            "model, hf_adapter a peft adapter; or resume the run for its last steps."
        )
    if not found:
        raise CheckpointError(f"{folder}: holds no GPT model: none of its {len(index)} arrays is an {EMBEDDING_KEY}.")
    if role == "critic" and "critic." not in found and f"actor.{BESIDE_KEY}" in index:
        return OpenedCheckpoint(folder, index, "actor.", as_critic=True)
    return OpenedCheckpoint(folder, index, _choose(folder, found, role))


def _choose(folder: Path, prefixes: Sequence[str], role: str | None) -> str:
    roles = [prefix.removesuffix(".") for prefix in prefixes]
    if role is None and len(prefixes) == 1:
        return prefixes[0]
    wanted = "actor" if role is None else role
    if wanted in roles:
        return prefixes[roles.index(wanted)]
    held = ", ".join(name or "(unnamed)" for name in roles)
    raise CheckpointError(
        f"{folder}: holds several models; choose one with --role: {held}."
        if role is None
        else f"{folder}: no role {role!r} in it. It holds: {held}."
    )


def without_head(weights: Sequence[Weight], opened: OpenedCheckpoint, optional: Collection[str]) -> list[str]:
    """The optional weights (a critic's head) that the checkpoint has no array for."""
    absent = {HEAD_KEY: not opened.has_value_head, BESIDE_KEY: opened.prefix + BESIDE_KEY not in opened.index}
    return [weight.name for weight in weights if weight.name in optional and absent.get(weight.megatron, False)]
