"""The same inputs through TRL's GRPO loss: the same loss and gradient."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from megaverl.algorithms import aggregations, combine, count_denominators, kl_loss, ppo_clip

trl = pytest.importorskip("trl", reason="TRL is an optional peer: pip install trl")


def trl_loss(log_probs, old, reference, advantages, mask, loss_type, beta):
    """TRL's own `_compute_loss`, given log-probs instead of a model to compute them with."""
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (log_probs, torch.zeros_like(log_probs), None),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=beta,
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=0.3,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics={"train": defaultdict(list)},
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
    )
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": torch.ones_like(ids),
        "completion_ids": ids,
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    return trl.GRPOTrainer._compute_loss(trainer, None, inputs)


@pytest.mark.parametrize(("loss_type", "mode"), [("grpo", "seq_mean_token_mean"), ("dapo", "token_mean")])
def test_grpo_loss_and_gradient(loss_type: str, mode: str):
    generator = torch.Generator().manual_seed(3)
    new, old, reference = (torch.randn(4, 7, generator=generator, dtype=torch.float64) for _ in range(3))
    advantages = torch.randn(4, generator=generator, dtype=torch.float64)
    mask = torch.arange(7) < torch.tensor([[7], [3], [1], [5]])

    theirs = new.clone().requires_grad_()
    try:
        loss = trl_loss(theirs, old, reference, advantages, mask, loss_type, beta=0.04)
    except (
        AttributeError,
        TypeError,
        KeyError,
    ) as error:  # its private method; other versions want other fields
        pytest.skip(f"TRL {trl.__version__} computes its loss from other fields: {error}")
    ours = new.clone().requires_grad_()
    weights = aggregations.get(mode).function(mask, count_denominators(mask), dtype=torch.float64)
    surrogate = ppo_clip(ours, old, advantages.unsqueeze(1).expand(4, 7), weights, clip_low=0.2, clip_high=0.3)
    total = combine((1.0, surrogate), (0.04, kl_loss(ours, reference, weights, kind="k3")))

    assert float(total.loss.detach()) == pytest.approx(float(loss.detach()), abs=1e-9)
    (wanted,) = torch.autograd.grad(loss, theirs)
    (gradient,) = torch.autograd.grad(total.loss, ours)
    torch.testing.assert_close(gradient, wanted, atol=1e-9, rtol=0)
