"""PPO written straight on transformers in one file, for comparison with megaverl (`bench_articles.py`).

    torchrun --nproc-per-node 2 tools/plain_ppo.py FOLDER

FOLDER is written by `step_sides.prepare`: a model, prompts and `job.json`. Every rank holds the policy, the reference
and the critic whole, generates with transformers' `generate`, and adds its gradients to those of the other ranks. The
only part of megaverl used here is the benchmark's own description of the work.

A step: generate, score, log-probs of policy and reference, values, GAE, then clipped updates of critic and policy.
Each rank writes its times to `spans_<rank>.jsonl`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# A checkout needs no installation of megaverl.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.step_sides import KL_COEF, LEARNING_RATE, Job, unique_words

GAMMA, LAMBDA = 1.0, 0.95
CLIP = 0.2  # of the ratio, and of the distance of a value from its old one
CRITIC_LEARNING_RATE = 1e-5
MAX_GRAD_NORM = 1.0
NUM_MINI_BATCHES = 2


@dataclass
class Batch:
    """Prompts, padded on the left, with their responses, padded on the right.

    Attributes:
        tokens: `[batch, prompt + response]` int64.
        mask: `[batch, prompt + response]` bool, False on padding.
        num_prompt: length of the prompt part.
    """

    tokens: Tensor
    mask: Tensor
    num_prompt: int

    @property
    def response_mask(self) -> Tensor:
        """`[batch, response]` bool."""
        return self.mask[:, self.num_prompt :]

    @property
    def model_inputs(self) -> dict[str, Tensor]:
        """Return the inputs of a model of transformers. Positions skip the padding."""
        positions = (self.mask.long().cumsum(1) - 1).clamp(min=0)
        return {
            "input_ids": self.tokens,
            "attention_mask": self.mask.long(),
            "position_ids": positions,
        }

    def rows(self, indices: Tensor) -> Batch:
        return Batch(self.tokens[indices], self.mask[indices], self.num_prompt)


@dataclass
class Spans:
    """Begin and end of the parts of each step, in the order in which they ended."""

    step: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Time the block under `name`."""
        begin = time.time()
        yield
        self.records.append(
            {
                "name": name,
                "step": self.step,
                "begin": begin,
                "end": time.time(),
            }
        )


class Critic(nn.Module):
    """Backbone of a language model with a linear value head, which starts at 0."""

    def __init__(self, backbone: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: Batch) -> Tensor:
        """Return the value of the state before each response token, `[batch, response]`."""
        hidden = self.backbone(**batch.model_inputs).last_hidden_state
        values = self.head(hidden).squeeze(-1)
        # The state before token t is the hidden state at t - 1.
        return values[:, batch.num_prompt - 1 : -1]


def log_probs(model: nn.Module, batch: Batch) -> Tensor:
    """Return the log-probability of each response token, `[batch, response]`."""
    num_response = batch.tokens.shape[1] - batch.num_prompt
    # The logits at t - 1 predict token t.
    logits = model(**batch.model_inputs, logits_to_keep=num_response + 1).logits
    all_log_probs = logits[:, :-1].float().log_softmax(-1)
    responses = batch.tokens[:, batch.num_prompt :]
    return all_log_probs.gather(-1, responses.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def generate(
    model: Any, prompts: Tensor, mask: Tensor, eos: int, num_tokens: int, exact: bool
) -> Batch:
    """Sample a response to each prompt at temperature 1.

    Args:
        prompts: `[batch, prompt]` int64, padded on the left.
        mask: `[batch, prompt]` bool.
        num_tokens: most tokens of a response.
        exact: whether all responses have `num_tokens` tokens, whatever they contain.
    """
    tokens = model.generate(
        input_ids=prompts,
        attention_mask=mask.long(),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=num_tokens,
        eos_token_id=None if exact else eos,
        pad_token_id=eos,
    )
    responses = tokens[:, prompts.shape[1] :]
    response_mask = torch.ones_like(responses, dtype=torch.bool)
    if not exact:
        # A response ends with its first end-of-sequence token.
        num_ends_before = (responses == eos).cumsum(1) - (responses == eos).long()
        response_mask = num_ends_before == 0
    return Batch(tokens, torch.cat([mask, response_mask], 1), prompts.shape[1])


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Return the score at each response's last token, minus `kl_coef` x KL at every token, `[batch, response]`."""
    rewards = -kl_coef * kl * mask
    last = mask.sum(1) - 1
    rewards[torch.arange(len(scores)), last] += scores
    return rewards


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns `[batch, response]`; arXiv 1506.02438, token by token from the last one."""
    advantages = torch.zeros_like(rewards)
    following_value = torch.zeros(len(rewards))
    following_advantage = torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * following_value - values[:, t]
        advantage = delta + gamma * lam * following_advantage
        inside = mask[:, t]
        advantages[:, t] = torch.where(inside, advantage, 0.0)
        following_value = torch.where(inside, values[:, t], following_value)
        following_advantage = torch.where(inside, advantage, following_advantage)
    return advantages, (advantages + values) * mask


def policy_loss(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """Return PPO's clipped loss of each token; arXiv 1707.06347, eq. 7."""
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def value_loss(new: Tensor, old: Tensor, returns: Tensor) -> Tensor:
    """Return the clipped squared error of each token; arXiv 2005.12729, section 3."""
    clipped = old + (new - old).clamp(-CLIP, CLIP)
    return 0.5 * torch.maximum((new - returns) ** 2, (clipped - returns) ** 2)


def total(value: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def normalize(values: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale the values under the mask to mean 0 and variance 1 over all ranks."""
    count = total(mask.sum().double())
    mean = total((values * mask).sum().double()) / count
    variance = total((((values - mean) * mask) ** 2).sum()) / count
    return ((values - mean) * (variance + 1e-8).rsqrt() * mask).float()


def take_update(
    model: nn.Module, optimizer: torch.optim.Optimizer, losses: Tensor, mask: Tensor
) -> None:
    """Step on the mean of the token losses `[batch, response]` over the mini-batches of all ranks."""
    num_tokens = total(mask.sum().float())
    optimizer.zero_grad()
    ((losses * mask).sum() / num_tokens).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = total(torch.cat([gradient.flatten() for gradient in gradients]))
    for gradient, whole in zip(
        gradients, flat.split([g.numel() for g in gradients]), strict=True
    ):
        gradient.copy_(whole.view_as(gradient))
    nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()


class PlainPPO:
    """Policy, reference and critic of one rank, and one PPO step over them."""

    def __init__(self, folder: Path, job: Job, seed: int = 0) -> None:
        from transformers import (
            AutoModel,
            AutoModelForCausalLM,
            PreTrainedTokenizerFast,
        )

        path = str(folder / "model")
        self.job = job
        # AutoTokenizer would build Qwen2's own tokenizer from this folder.
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(
            path, padding_side="left"
        )
        self.policy = AutoModelForCausalLM.from_pretrained(path)
        # `generate` would take this over its argument None.
        self.policy.generation_config.eos_token_id = None
        self.reference = AutoModelForCausalLM.from_pretrained(path).eval()
        self.reference.requires_grad_(False)
        self.critic = Critic(AutoModel.from_pretrained(path), job.hidden)
        self.policy_optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=LEARNING_RATE
        )
        self.critic_optimizer = torch.optim.AdamW(
            self.critic.parameters(), lr=CRITIC_LEARNING_RATE
        )
        self.spans = Spans()
        torch.manual_seed(seed)

    def step(self, number: int, prompts: list[str]) -> dict[str, float]:
        """Train on one response to each of this rank's prompts."""
        self.spans.step = number
        measure = self.spans.measure
        with measure("rollout"):
            encoded = self.tokenizer(prompts, return_tensors="pt", padding=True)
            batch = generate(
                self.policy,
                encoded.input_ids,
                encoded.attention_mask.bool(),
                self.tokenizer.eos_token_id,
                self.job.response_tokens,
                exact=True,
            )
        with measure("reward"):
            responses = batch.tokens[:, batch.num_prompt :]
            texts = self.tokenizer.batch_decode(responses)
            scores = torch.tensor(
                [unique_words("", text, None, None) for text in texts]
            )
        mask = batch.response_mask
        with torch.no_grad():
            with measure("old_log_probs"):
                old = log_probs(self.policy, batch)
            with measure("ref_log_probs"):
                reference = log_probs(self.reference, batch)
            with measure("values"):
                old_values = self.critic(batch)
            with measure("advantages"):
                rewards = token_rewards(scores, old - reference, mask, KL_COEF)
                advantages, returns = gae(rewards, old_values, mask, GAMMA, LAMBDA)
                advantages = normalize(advantages, mask)
        mini_batches = torch.randperm(len(scores)).chunk(NUM_MINI_BATCHES)
        with measure("critic_update"):
            for rows in mini_batches:
                values = self.critic(batch.rows(rows))
                losses = value_loss(values, old_values[rows], returns[rows])
                take_update(self.critic, self.critic_optimizer, losses, mask[rows])
        with measure("actor_update"):
            for rows in mini_batches:
                new = log_probs(self.policy, batch.rows(rows))
                losses = policy_loss(new, old[rows], advantages[rows])
                take_update(self.policy, self.policy_optimizer, losses, mask[rows])
        return {
            "reward": float(scores.mean()),
            "kl": float((old - reference)[mask].mean()),
            "tokens": float(mask.sum()),
        }


def main(folder: Path) -> int:
    """Run one rank, and write its spans."""
    job = Job(**json.loads((folder / "job.json").read_text()))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    trainer = PlainPPO(folder, job, seed=rank)
    for step in range(job.warmup + job.steps):
        rows = prompts[step * job.prompts : (step + 1) * job.prompts]
        trainer.step(step, rows[rank::world])
    records = [{"rank": rank, **record} for record in trainer.spans.records]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / f"spans_{rank}.jsonl").write_text(text, encoding="utf-8")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    # The environment of torchrun names the rank.
    if "RANK" not in os.environ:
        sys.exit("Start this with torchrun --nproc-per-node N.")
    sys.exit(main(Path(sys.argv[1])))
