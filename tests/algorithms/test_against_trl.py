"""The same inputs through TRL's losses (GRPO, RLOO, DPO and their kin, reward models): the same loss and gradient."""

from __future__ import annotations

import importlib
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megaverl.algorithms import (
    aggregations,
    bradley_terry,
    combine,
    count_denominators,
    divergences,
    kl_loss,
    kto_reference_kl,
    policy_losses,
    ppo_clip,
    preference_losses,
)

trl = pytest.importorskip("trl", reason="TRL is an optional peer: pip install trl")


def trl_class(module: str, name: str):
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        pytest.skip(f"TRL {trl.__version__} has no {module}.{name}: {error}")


def trl_loss(
    log_probs,
    old,
    reference,
    advantages,
    mask,
    loss_type,
    beta,
    level="token",
    owner=None,
):
    """TRL's own `_compute_loss`, given log-probs instead of a model to compute them with."""
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (
            log_probs,
            torch.zeros_like(log_probs),
            None,
        ),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=0.3,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        _metrics={"train": defaultdict(list)},
        max_completion_length=7,
        args=SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
        ),
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
    return (owner or trl.GRPOTrainer)._compute_loss(trainer, None, inputs)


def inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    new, old, reference = (
        torch.randn(4, 7, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    advantages = torch.randn(4, generator=generator, dtype=torch.float64)
    return (
        new,
        old,
        reference,
        advantages,
        torch.arange(7) < torch.tensor([[7], [3], [1], [5]]),
    )


@pytest.mark.parametrize(
    ("loss_type", "mode"), [("grpo", "seq_mean_token_mean"), ("dapo", "token_mean")]
)
def test_grpo_loss_and_gradient(loss_type: str, mode: str):
    new, old, reference, advantages, mask = inputs()
    theirs = new.clone().requires_grad_()
    try:
        loss = trl_loss(theirs, old, reference, advantages, mask, loss_type, beta=0.04)
    except (
        AttributeError,
        TypeError,
        KeyError,
    ) as error:  # its private method; other versions want other fields
        pytest.skip(
            f"TRL {trl.__version__} computes its loss from other fields: {error}"
        )
    ours = new.clone().requires_grad_()
    weights = aggregations.get(mode).function(
        mask, count_denominators(mask), dtype=torch.float64
    )
    surrogate = ppo_clip(
        ours,
        old,
        advantages.unsqueeze(1).expand(4, 7),
        weights,
        clip_low=0.2,
        clip_high=0.3,
    )
    total = combine(
        (1.0, surrogate), (0.04, kl_loss(ours, reference, weights, kind="k3"))
    )

    assert float(total.loss.detach()) == pytest.approx(float(loss.detach()), abs=1e-9)
    (wanted,) = torch.autograd.grad(loss, theirs)
    (gradient,) = torch.autograd.grad(total.loss, ours)
    torch.testing.assert_close(gradient, wanted, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("loss_type", "level", "name", "mode", "options"),
    [
        # TRL's limit is the ratio's.
        ("cispo", "token", "cispo", "token_mean", {"clip_low": 1.0, "clip_high": -0.7}),
        ("sapo", "token", "sapo", "seq_mean_token_mean", {}),
        (
            "grpo",
            "sequence",
            "gspo",
            "seq_mean_token_mean",
            {"clip_low": 0.2, "clip_high": 0.3},
        ),
        (
            "gmpo",
            "token",
            "gmpo",
            "seq_mean_token_mean",
            {"clip_low": 0.2, "clip_high": 0.3},
        ),
        (
            "dr_grpo",
            "token",
            "ppo_clip",
            "fixed_length",
            {"clip_low": 0.2, "clip_high": 0.3},
        ),
    ],
)
def test_the_other_losses_that_trl_has(
    loss_type: str, level: str, name: str, mode: str, options: dict[str, float]
):
    new, old, reference, advantages, mask = inputs()
    theirs, ours = new.clone().requires_grad_(), new.clone().requires_grad_()
    try:
        owner = (
            trl_class("trl.experimental.gmpo", "GMPOTrainer")
            if loss_type == "gmpo"
            else None
        )
        wanted = trl_loss(
            theirs, old, reference, advantages, mask, loss_type, 0.0, level, owner
        )
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        pytest.skip(
            f"TRL {trl.__version__} computes its loss from other fields: {error}"
        )
    fixed = {"max_tokens": 7} if mode == "fixed_length" else {}
    weights = aggregations.get(mode).function(
        mask, count_denominators(mask), dtype=torch.float64, **fixed
    )
    batch = {
        "log_probs": ours,
        "old_log_probs": old,
        "advantages": advantages.unsqueeze(1).expand(4, 7),
    }
    loss = policy_losses.get(name)({**batch, "weights": weights}, **options).loss
    # TRL's temperatures of SAPO are rounded to float32
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), abs=1e-7)
    gradients = [
        torch.autograd.grad(value, leaf)[0]
        for value, leaf in ((loss, ours), (wanted, theirs))
    ]
    torch.testing.assert_close(*gradients, atol=1e-7, rtol=0)


def log_prob_pairs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    means = [-0.05 - 3 * torch.rand(6, generator=generator) for _ in range(2)]
    lengths = [torch.randint(1, 9, (6,), generator=generator) for _ in range(2)]
    return means[0], means[1], lengths[0], lengths[1]


def test_simpo_and_orpo():
    chosen, rejected, *lengths = log_prob_pairs()
    batch = {
        "chosen_log_probs": chosen * lengths[0],
        "rejected_log_probs": rejected * lengths[1],
    }
    batch |= {
        "chosen_lengths": lengths[0],
        "rejected_lengths": lengths[1],
        "weights": torch.full((6,), 1 / 6),
    }
    device = SimpleNamespace(device="cpu")
    simpo = SimpleNamespace(
        alpha=0.0,
        beta=2.5,
        simpo_gamma=0.7,
        label_smoothing=0.0,
        loss_type="simpo",
        accelerator=device,
    )
    wanted, *_ = trl_class("trl.experimental.cpo", "CPOTrainer").cpo_loss(
        simpo, chosen, rejected
    )
    ours = preference_losses.get("simpo")(batch, beta=2.5, gamma=0.7).loss
    assert float(ours) == pytest.approx(float(wanted.mean()), abs=1e-6)
    orpo = SimpleNamespace(beta=0.2, accelerator=device)
    ratios, *_ = trl_class("trl.experimental.orpo", "ORPOTrainer").odds_ratio_loss(
        orpo, chosen, rejected
    )
    ours = preference_losses.get("orpo")(batch, lam=0.2).loss
    assert float(ours) == pytest.approx(float(-chosen.mean() - ratios.mean()), abs=1e-5)


def test_jensen_shannon():
    generator = torch.Generator().manual_seed(6)
    student, teacher = (torch.randn(2, 3, 5, generator=generator) for _ in range(2))
    wanted = trl_class("trl.experimental.gkd", "GKDTrainer").generalized_jsd_loss(
        student, teacher, labels=torch.zeros(2, 3), beta=0.3
    )
    function = divergences.get("jensen_shannon").function
    ours = function(student.log_softmax(-1), teacher.log_softmax(-1), beta=0.3).mean()
    assert float(ours) == pytest.approx(float(wanted), abs=1e-6)


class Same:
    """An accelerator of one process."""

    device = torch.device("cpu")
    num_processes = 1
    gather = gather_for_metrics = staticmethod(lambda value: value)
    reduce = staticmethod(lambda value, reduction: value)


def trainer_of(**fields) -> SimpleNamespace:
    """What a trainer's loss reads of it, besides `fields`."""
    common = {
        "accelerator": Same(),
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list)},
    }
    return SimpleNamespace(model=SimpleNamespace(training=True), **common, **fields)


def test_rloo_gradient_on_policy():
    """TRL's ratio is that of whole responses; where the policy is the one that sampled, both are REINFORCE's."""
    new, _, _, advantages, mask = inputs()
    theirs, ours = new.clone().requires_grad_(), new.clone().requires_grad_()
    trainer = trainer_of(
        _get_per_token_logps_and_entropies=lambda *a, **k: (
            theirs,
            torch.zeros_like(theirs),
            None,
        ),
        epsilon_low=0.2,
        epsilon_high=0.2,
    )
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    batch = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": mask.long(),
    }
    batch |= {"old_logps": torch.where(mask, new, 0.0).sum(1), "advantages": advantages}
    try:
        loss = trl_class("trl", "RLOOTrainer")._compute_loss(trainer, None, batch)
    except (AttributeError, TypeError, KeyError) as error:
        pytest.skip(
            f"TRL {trl.__version__} computes its loss from other fields: {error}"
        )
    weights = aggregations.get("seq_mean_token_sum").function(
        mask, count_denominators(mask), dtype=torch.float64
    )
    given = {
        "log_probs": ours,
        "old_log_probs": new,
        "advantages": advantages.unsqueeze(1).expand(4, 7),
    }
    value = policy_losses.get("ppo_clip")({**given, "weights": weights}).loss
    (wanted,) = torch.autograd.grad(loss, theirs)
    (gradient,) = torch.autograd.grad(value, ours)
    torch.testing.assert_close(gradient, wanted, atol=1e-9, rtol=0)


@pytest.mark.parametrize(("loss_type", "name"), [("sigmoid", "dpo"), ("ipo", "ipo")])
def test_dpo_loss_and_gradient(loss_type: str, name: str):
    """Through TRL's own loss, given a model that says these log-probs."""
    generator = torch.Generator().manual_seed(7)
    new, reference = (
        torch.randn(6, 8, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    mask = torch.arange(8) < torch.tensor([[8], [3], [1], [5], [2], [8]])
    theirs, ours = new.clone().requires_grad_(), new.clone().requires_grad_()
    trainer = trainer_of(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=0.3,
        label_smoothing=0.0,
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
    )
    said = torch.where(mask, theirs, 0.0)
    frozen = torch.where(mask, reference, 0.0).sum(1)
    # A prompt of one token.
    completion = torch.cat([torch.zeros(6, 1, dtype=torch.int64), mask.long()], dim=1)
    batch = {
        "input_ids": torch.ones(6, 9, dtype=torch.int64),
        "completion_mask": completion,
    }
    batch |= {"attention_mask": torch.ones_like(completion)}
    batch |= {"ref_chosen_logps": frozen[:3], "ref_rejected_logps": frozen[3:]}

    nothing = torch.zeros(6, 8)
    outputs = SimpleNamespace(
        log_probs=said, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool()
    )
    try:
        loss = trl_class("trl", "DPOTrainer")._compute_loss(
            trainer, lambda **given: outputs, batch, False
        )
    except (AttributeError, TypeError, KeyError) as error:
        pytest.skip(
            f"TRL {trl.__version__} computes its loss from other fields: {error}"
        )
    sums, lengths = torch.where(mask, ours, 0.0).sum(1), mask.sum(1)
    given = {
        "chosen_log_probs": sums[:3],
        "rejected_log_probs": sums[3:],
        "weights": torch.full((3,), 1 / 3),
    }
    given |= {"ref_chosen_log_probs": frozen[:3], "ref_rejected_log_probs": frozen[3:]}
    given |= {"chosen_lengths": lengths[:3], "rejected_lengths": lengths[3:]}
    value = preference_losses.get(name)(given, beta=0.3).loss
    assert float(value.detach()) == pytest.approx(float(loss.detach()), abs=1e-7)
    gradients = [
        torch.autograd.grad(total, leaf)[0]
        for total, leaf in ((value, ours), (loss, theirs))
    ]
    torch.testing.assert_close(*gradients, atol=1e-7, rtol=0)


def test_kto_loss_and_gradient():
    """Desirable and undesirable responses of unequal number, next to the same mismatched ones."""
    generator = torch.Generator().manual_seed(9)
    new, reference, crossed = (
        torch.randn(5, 8, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    frozen = crossed - 0.3 * torch.rand(5, 8, generator=generator, dtype=torch.float64)
    mask = torch.arange(8) < torch.tensor([[8], [3], [1], [5], [2]])
    label = torch.tensor([True, False, False, True, False])
    theirs, ours = new.clone().requires_grad_(), new.clone().requires_grad_()
    said, refs = (
        torch.where(mask, theirs, 0.0),
        torch.where(mask, reference, 0.0).sum(1),
    )
    trainer = trainer_of(
        calculate_KL=True,
        _compute_kl_logps=lambda *a: crossed.sum(1),
        precompute_ref_logps=True,
        loss_type="kto",
        beta=0.3,
        desirable_weight=1.2,
        undesirable_weight=0.7,
        _total_train_tokens=0,
        _tp_size=1,
    )
    completion = torch.cat([torch.zeros(5, 1, dtype=torch.int64), mask.long()], dim=1)
    batch = {
        "input_ids": torch.ones(5, 9, dtype=torch.int64),
        "completion_mask": completion,
        "label": label,
    }
    batch |= {
        "attention_mask": torch.ones_like(completion),
        "ref_logps": refs,
        "ref_KL_logps": frozen.sum(1),
    }
    nothing = torch.zeros(5, 8)
    outputs = SimpleNamespace(log_probs=said, entropy=nothing, mean_logits=nothing)
    try:
        owner = trl_class("trl", "KTOTrainer") if hasattr(trl, "KTOTrainer") else None
        owner = owner or trl_class("trl.experimental.kto", "KTOTrainer")
        loss = owner._compute_loss(trainer, lambda **given: outputs, batch, False)
    except (AttributeError, TypeError, KeyError) as error:
        pytest.skip(
            f"TRL {trl.__version__} computes its loss from other fields: {error}"
        )
    given = {
        "log_probs": torch.where(mask, ours, 0.0).sum(1),
        "ref_log_probs": refs,
        "desirable": label,
    }
    given |= {
        "reference_kl": kto_reference_kl(crossed.sum(1), frozen.sum(1)),
        "weights": torch.full((5,), 0.2),
    }
    value = preference_losses.get("kto")(
        given, beta=0.3, desirable_weight=1.2, undesirable_weight=0.7
    ).loss
    assert float(value.detach()) == pytest.approx(float(loss.detach()), abs=1e-7)
    gradients = [
        torch.autograd.grad(total, leaf)[0]
        for total, leaf in ((value, ours), (loss, theirs))
    ]
    torch.testing.assert_close(*gradients, atol=1e-7, rtol=0)


def test_reward_model_loss():
    scores = torch.randn(8, 1, generator=torch.Generator().manual_seed(8))
    margin = torch.tensor([0.0, 0.5, 1.0, 2.0])
    trainer = trainer_of(
        args=SimpleNamespace(center_rewards_coefficient=0.02),
        _total_train_tokens=0,
        _tp_size=1,
        loss_type=None,
    )
    batch = {"margin": margin, "attention_mask": torch.ones(8, 3)}
    try:
        owner = trl_class("trl", "RewardTrainer")
        wanted = owner.compute_loss(
            trainer, lambda **given: SimpleNamespace(logits=scores), batch
        )
    except (AttributeError, TypeError, KeyError) as error:
        pytest.skip(
            f"TRL {trl.__version__} computes its loss from other fields: {error}"
        )
    ours = bradley_terry(
        scores[:4, 0], scores[4:, 0], torch.full((4,), 0.25), margin, center_coef=0.02
    )
    assert float(ours.loss) == pytest.approx(float(wanted), abs=1e-6)


def test_vespo_with_a_correction():
    """TRL's own loss of VESPO, with the weights of its token_truncate and token_mask."""
    new, old, _, advantages, mask = inputs()
    new, old = new * 0.1 - 2.0, old * 0.1 - 2.0
    weights = 0.8 + 0.4 * torch.rand(
        mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    weights[0, 2] = 0.0
    weights = torch.where(mask, weights, 1.0)
    owner = trl_class("trl", "GRPOTrainer")
    try:
        kernel = owner.get_gamma_weights(advantages[:, None], new - old, mask, weights)
    except (AttributeError, TypeError) as error:
        pytest.skip(
            f"TRL {trl.__version__} computes its kernel from other fields: {error}"
        )
    theirs, ours = new.clone().requires_grad_(), new.clone().requires_grad_()
    wanted = (-kernel * advantages[:, None] * theirs)[mask].mean()
    tokens = {
        "log_probs": ours,
        "old_log_probs": old,
        "advantages": advantages[:, None].expand(4, 7),
    }
    tokens |= {"weights": mask.double() / mask.sum(), "importance_weights": weights}
    loss = policy_losses.get("vespo")(tokens).loss
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), abs=1e-7)
    gradients = [
        torch.autograd.grad(value, leaf)[0]
        for value, leaf in ((loss, ours), (wanted, theirs))
    ]
    torch.testing.assert_close(*gradients, atol=1e-7, rtol=0)


def test_cpo_by_tokens():
    """TRL's first term; its second is a cross-entropy over all tokens of the chosen responses."""
    chosen, rejected, *lengths = log_prob_pairs()
    sums = chosen * lengths[0], rejected * lengths[1]
    trainer = SimpleNamespace(
        alpha=0.0,
        beta=0.2,
        label_smoothing=0.0,
        loss_type="sigmoid",
        accelerator=SimpleNamespace(device="cpu"),
    )
    first, *_ = trl_class("trl.experimental.cpo", "CPOTrainer").cpo_loss(trainer, *sums)
    wanted = first.mean() - 0.7 * sums[0].sum() / lengths[0].sum()
    batch = {
        "chosen_log_probs": sums[0],
        "rejected_log_probs": sums[1],
        "weights": torch.full((6,), 1 / 6),
    }
    batch |= {"mean_chosen_length": lengths[0].double().mean()}
    ours = preference_losses.get("cpo")(batch, beta=0.2, lam=0.7, sft_over="token").loss
    assert float(ours) == pytest.approx(float(wanted), abs=1e-6)
