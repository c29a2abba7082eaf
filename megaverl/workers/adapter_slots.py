"""Several sets of adapters on one base model, each with its own weights, gradient and optimizer state.

A model computes with one set at a time, the live one. The others wait in their slots:

    slots = AdapterSlots(trainable)
    slots.create("a", seed=1)
    slots.create("b", seed=2)
    slots.activate("a")        # copies a's weights into the model; a's moments are used from now on
    slots.add_gradients()      # adds what `trainable.compute_gradients` left
    slots.step(settings)       # one optimizer step on all gradients since the last one
    slots.activate("b")        # copies a's weights back to its slot first

A set's numbers are the same, bit for bit, whichever other sets are trained between its
calls: everything that a step reads is part of the slot.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megaverl.errors import ModelError
from megaverl.models.lora.adapter_set import reset_factors
from megaverl.workers.optimizers import MegatronTrainable


@dataclass(frozen=True)
class AdamStep:
    """Settings of one optimizer step of AdamW (arXiv 1711.05101), which a client may change at each step.

    Attributes:
        max_norm: larger gradients are clipped to this norm. 0: no clipping.
    """

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_norm: float


@dataclass
class AdapterSlot:
    """State of one set of adapters on this rank.

    Attributes:
        weights: values of the factors and of their float32 master copies, in the order of `AdapterSlots`. Outdated
            while the set is live.
        states: state of each torch optimizer: moments and step counts by parameter.
        group_steps: step count of each parameter group, for optimizers that count per group (Transformer Engine).
        gradients: sum of the gradients since the last step. None: there are none.
        num_steps: number of steps taken.
    """

    weights: list[torch.Tensor]
    states: list[dict[Any, Any]]
    group_steps: list[int | None]
    gradients: list[torch.Tensor] | None = None
    num_steps: int = 0


@dataclass
class AdapterSlots:
    """All sets of adapters of one model on this rank. Every rank of the model calls every method alike.

    Args:
        trainable: model with adapters, and its Adam optimizer.

    Attributes:
        live: name of the set that the model computes with. None: none, and the model's factors may have any value.
    """

    trainable: MegatronTrainable
    live: str | None = field(default=None, init=False)
    _slots: dict[str, AdapterSlot] = field(default_factory=dict, init=False)

    def __contains__(self, name: str) -> bool:
        return name in self._slots

    def __getitem__(self, name: str) -> AdapterSlot:
        return self._slots[name]

    def create(self, name: str, seed: int) -> None:
        """Create a set of new adapters under a name, replacing one of that name, and make it live.

        Args:
            seed: seed of the initial factors.
        """
        self.leave()
        self._slots.pop(name, None)
        adapters = self.trainable.model.adapters
        assert adapters is not None, "the configuration requires actor.lora"
        reset_factors(adapters, seed)
        self._adopt(name)

    def _adopt(self, name: str) -> None:
        """Make a new slot of the factors that the model has, with an optimizer that has taken no step."""
        self.trainable.optimizer.reload_model_params()
        optimizers = self.trainable.torch_optimizers
        slot = AdapterSlot(
            [tensor.clone() for tensor in self._tensors()],
            [defaultdict(dict) for _ in optimizers],
            [0 if "step" in group else None for group in self._groups()],
        )
        self._slots[name] = slot
        self._use_optimizer_state(slot)
        self.live = name

    def activate(self, name: str) -> None:
        """Make a set live: the model computes with it from now on.

        Raises:
            ModelError: there is no set of that name.
        """
        slot = self._slots.get(name)
        if slot is None:
            raise ModelError(f"{name} was not created, or its session is over.")
        if self.live == name:
            return
        self.leave()
        with torch.no_grad():
            for tensor, saved in zip(self._tensors(), slot.weights, strict=True):
                tensor.copy_(saved)
        self._use_optimizer_state(slot)
        self.live = name

    def leave(self) -> None:
        """Store the live set in its slot. The model's factors may then be overwritten."""
        if self.live is None:
            return
        slot = self._slots[self.live]
        with torch.no_grad():
            for saved, tensor in zip(slot.weights, self._tensors(), strict=True):
                saved.copy_(tensor)
        slot.group_steps = [group.get("step") for group in self._groups()]
        # Loading a checkpoint replaces the optimizers' state.
        slot.states = [optimizer.state for optimizer in self.trainable.torch_optimizers]
        self.live = None

    def drop(self, name: str) -> None:
        """Forget a set, if there is one of that name."""
        if self.live == name:
            self.live = None
        self._slots.pop(name, None)

    def rename(self, name: str, new_name: str) -> None:
        """Give the live set another name, replacing the set of that name."""
        assert self.live == name
        self._slots[new_name] = self._slots.pop(name)
        self.live = new_name

    def forget_moments(self) -> None:
        """Reset the optimizer of the live set, as if it had taken no step."""
        assert self.live is not None
        slot = self._slots[self.live]
        slot.states = [defaultdict(dict) for _ in slot.states]
        slot.group_steps = [None if step is None else 0 for step in slot.group_steps]
        slot.num_steps = 0
        self._use_optimizer_state(slot)

    def add_gradients(self) -> None:
        """Add the gradients that the model holds to those of the live set."""
        assert self.live is not None
        slot = self._slots[self.live]
        gradients = list(self.trainable.gradients.values())
        if slot.gradients is None:
            slot.gradients = [gradient.clone() for gradient in gradients]
            return
        for total, gradient in zip(slot.gradients, gradients, strict=True):
            total.add_(gradient)

    def step(self, settings: AdamStep) -> float:
        """Take one optimizer step of the live set on its gradients, and drop these. Collective.

        Without gradients the step is taken on zeros.

        Returns:
            The norm of the gradients before clipping. NaN: it is not finite, and no step was taken.
        """
        assert self.live is not None
        slot = self._slots[self.live]
        for group in self._groups():
            group["lr"] = settings.learning_rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = settings.weight_decay * group.get("wd_mult", 1.0)
            group["betas"] = (settings.beta1, settings.beta2)
            group["eps"] = settings.eps
        with self.trainable.updating():
            self.trainable.zero_gradients()
            places = self.trainable.gradients.values()
            for place, gradient in zip(places, slot.gradients or (), strict=False):
                place.copy_(gradient)
            norm = self.trainable.apply_gradients(settings.max_norm)
        slot.gradients = None
        if not math.isnan(norm):
            slot.num_steps += 1
        return norm

    def _tensors(self) -> list[torch.Tensor]:
        """Return the factors and their master copies. Masters that are views of the factors are left out."""
        adapters = self.trainable.model.adapters
        assert adapters is not None
        factors = [tensor.detach() for tensor in adapters.parameters.values()]
        shared = {tensor.untyped_storage().data_ptr() for tensor in factors}
        masters = [
            tensor
            for tensor in self.trainable.masters.values()
            if tensor.untyped_storage().data_ptr() not in shared
        ]
        return factors + masters

    def _groups(self) -> Sequence[dict[str, Any]]:
        optimizers = self.trainable.torch_optimizers
        return [group for optimizer in optimizers for group in optimizer.param_groups]

    def _use_optimizer_state(self, slot: AdapterSlot) -> None:
        """Let the optimizers read and write the state of this slot."""
        optimizers = self.trainable.torch_optimizers
        for optimizer, state in zip(optimizers, slot.states, strict=True):
            optimizer.state = state  # type: ignore[assignment]
        for group, step in zip(self._groups(), slot.group_steps, strict=True):
            if step is not None:
                group["step"] = step
