"""Clients of the real package on one real server: numbers against peft, side by side, saved and refused."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.trainer.tinker import recipes
from tests.trainer.tinker.server import KEY, RANK, Server, datum

tinker = pytest.importorskip("tinker")

ROWS = [[5, 6, 7, 8, 9], [40, 41, 42], [100, 7, 300, 12, 13, 14, 15]]
OLD = [[-5.0, -5.5, -6.0, -5.2], [-5.9, -5.1], [-5.5, -6.1, -5.3, -5.8, -6.2, -5.6]]
ADVANTAGES = [[0.0, 1.0, 1.0, 1.0], [-0.5, -0.5], [0.0, 0.0, 2.0, 2.0, 2.0, 2.0]]
ADAM = {"learning_rate": 2e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def supervised_rows() -> list[Any]:
    return [datum(row, weights=[1.0] * (len(row) - 1)) for row in ROWS]


def policy_rows() -> list[Any]:
    rows = zip(ROWS, OLD, ADVANTAGES, strict=True)
    return [datum(row, logprobs=old, advantages=adv) for row, old, adv in rows]


@contextmanager
def connected(server: Server) -> Iterator[Any]:
    """Yield a client, whose session is over at the end."""
    client = server.client()
    yield client
    client.close("success").result()


def new_model(client: Any, server: Server, seed: int = 1) -> Any:
    return client.create_lora_training_client(
        base_model=str(server.model), rank=RANK, seed=seed
    ).result()


def step(model: Any, rows: list[Any], loss: str = "cross_entropy") -> tuple[Any, Any]:
    """Send a gradient and a step at once. Return both results."""
    gradient = model.forward_backward(rows, loss)
    stepped = model.optim_step(tinker.AdamParams(**ADAM))
    return gradient.result(), stepped.result()


def log_probs_of(output: Any) -> list[list[float]]:
    return [list(row["logprobs"].data) for row in output.loss_fn_outputs]


class Reference:
    """The same adapters in float64, in peft on a model of transformers."""

    def __init__(self, server: Server, adapter: Path) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float64)
        self.model = PeftModel.from_pretrained(base, adapter, is_trainable=True)
        self.model.double()
        self.trained = {
            name.replace(".default", ""): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    def log_probs(self) -> list[torch.Tensor]:
        """Return the log-probs of the tokens of ROWS after the first."""
        result = []
        for row in ROWS:
            logits = self.model(torch.tensor([row[:-1]])).logits[0]
            chosen = F.log_softmax(logits, -1).gather(
                -1, torch.tensor(row[1:])[:, None]
            )
            result.append(chosen[:, 0])
        return result

    def ppo(self) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for now, old, advantage in zip(self.log_probs(), OLD, ADVANTAGES, strict=True):
            ratio = (now - torch.tensor(old)).exp()
            advantages = torch.tensor(advantage)
            clipped = ratio.clamp(0.8, 1.2)
            loss = loss - torch.min(ratio * advantages, clipped * advantages).sum()
        return loss

    def cross_entropy(self) -> torch.Tensor:
        return -torch.cat(self.log_probs()).sum()


@pytest.mark.parametrize("loss", ["cross_entropy", "ppo"])
def test_losses_and_gradients_are_those_of_peft(server: Server, loss: str) -> None:
    rows = supervised_rows() if loss == "cross_entropy" else policy_rows()
    with connected(server) as client:
        model = new_model(client, server)
        step(model, supervised_rows())  # so that B is not zero
        before = model.save_weights_for_sampler("before").result().path
        output, stepped = step(model, rows, loss)
    reference = Reference(server, server.adapter(before))
    expected = [row.tolist() for row in reference.log_probs()]
    for row, expected_row in zip(log_probs_of(output), expected, strict=True):
        assert row == pytest.approx(expected_row, abs=2e-5)
    value: torch.Tensor = getattr(reference, loss)()
    assert output.metrics["loss:sum"] == pytest.approx(float(value.detach()), rel=1e-5)
    value.backward()
    norms = [p.grad.norm() for p in reference.trained.values() if p.grad is not None]
    norm = float(torch.stack(norms).norm())
    assert stepped.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_steps_are_those_of_torch(server: Server) -> None:
    settings = {**ADAM, "weight_decay": 0.1, "grad_clip_norm": 1.0}
    with connected(server) as client:
        model = new_model(client, server, seed=5)
        start = model.save_weights_for_sampler("start").result().path
        for _ in range(3):
            # The gradients of two requests add up.
            model.forward_backward(supervised_rows()[:1], "cross_entropy")
            model.forward_backward(supervised_rows()[1:], "cross_entropy")
            model.optim_step(tinker.AdamParams(**settings)).result()
        end = model.save_weights_for_sampler("end").result().path
    reference = Reference(server, server.adapter(start))
    optimizer = torch.optim.AdamW(
        reference.trained.values(), 2e-3, (0.9, 0.95), 1e-8, weight_decay=0.1
    )
    for _ in range(3):
        optimizer.zero_grad()
        reference.cross_entropy().backward()
        torch.nn.utils.clip_grad_norm_(reference.trained.values(), 1.0)
        optimizer.step()
    trained = load_file(server.adapter(end) / "adapter_model.safetensors")
    for name, parameter in reference.trained.items():
        # A step moves an element by about 2e-3.
        difference = (trained[name] - parameter.detach()).abs()
        assert difference.mean() < 1e-6 and difference.max() < 1e-4, name


def test_clients_side_by_side_do_not_change_each_others_bits(server: Server) -> None:
    first, second = supervised_rows(), policy_rows()

    def end(model: Any, name: str) -> bytes:
        path = model.save_weights_for_sampler(name).result().path
        return (server.adapter(path) / "adapter_model.safetensors").read_bytes()

    with connected(server) as client:
        alone = []
        for seed, rows, loss in ((1, first, "cross_entropy"), (2, second, "ppo")):
            model = new_model(client, server, seed)
            for _ in range(3):
                step(model, rows, loss)
            alone.append(end(model, "alone"))
    with connected(server) as one, connected(server) as other:
        a, b = new_model(one, server, 1), new_model(other, server, 2)
        for number in range(3):
            gradient = a.forward_backward(first, "cross_entropy")
            # b takes a whole step, and samples, between a's gradient and a's step.
            step(b, second, "ppo")
            sampler = b.save_weights_and_get_sampling_client().result()
            prompt = tinker.ModelInput.from_ints([5, 6])
            params = tinker.SamplingParams(max_tokens=4)
            sampler.sample(prompt, 2, params).result()
            if number == 1:
                a.save_state("half").result()
            a.optim_step(tinker.AdamParams(**ADAM)).result()
            gradient.result()
        assert [end(a, "beside"), end(b, "beside")] == alone


def test_a_saved_state_goes_on_as_if_nothing_had_happened(server: Server) -> None:
    rows = supervised_rows()
    with connected(server) as client:
        model = new_model(client, server)
        step(model, rows)
        path = model.save_state("state", user_metadata={"k": "v"}).result().path
        with pytest.raises(
            tinker.RequestFailedError, match="overwrite=True"
        ) as refused:
            model.save_state("state").result()
        assert refused.value.category is tinker.types.RequestErrorCategory.User
        expected = [step(model, rows)[0].metrics for _ in range(2)]
    with connected(server) as client:
        restored = client.create_training_client_from_state_with_optimizer(path)
        model = restored.result()
        assert [step(model, rows)[0].metrics for _ in range(2)] == expected
        # Without the moments the first losses are equal, and those after a step are
        # not.
        fresh = client.create_training_client_from_state(path).result()
        losses = [step(fresh, rows)[0].metrics for _ in range(2)]
        assert losses[0] == expected[0] and losses[1] != expected[1]
        rest = client.create_rest_client()
        info = rest.get_weights_info_by_tinker_path(path).result()
        assert (info.lora_rank, info.base_model) == (RANK, str(server.model))
        run = path.removeprefix("tinker://").split("/")[0]
        [listed] = rest.list_checkpoints(run).result().checkpoints
        assert listed.tinker_path == path and listed.user_metadata == {"k": "v"}
        # Damage is noticed, and the model keeps what it had.
        folder = server.saved / run / "weights" / "state"
        shard = max(folder.rglob("*.distcp"), key=lambda file: file.stat().st_size)
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
        expected_loss = fresh.forward(rows, "cross_entropy").result().metrics
        with pytest.raises(tinker.RequestFailedError):
            client.create_training_client_from_state(path).result()
        assert fresh.forward(rows, "cross_entropy").result().metrics == expected_loss
        rest.delete_checkpoint_from_tinker_path(path).result()
        assert not folder.exists()


def test_samples_come_from_the_weights_that_were_saved(server: Server) -> None:
    prompt = tinker.ModelInput.from_ints([5, 6, 7])
    with connected(server) as client:
        model = new_model(client, server)
        for _ in range(2):
            step(model, supervised_rows())
        sampler = model.save_weights_and_get_sampling_client().result()
        # Later steps do not change the snapshot.
        step(model, supervised_rows())
        # A name that is used again names other weights.
        named = model.save_weights_for_sampler("named").result().path
        old = client.create_sampling_client(named).result()
        scored = tinker.ModelInput.from_ints(ROWS[0])
        one_token = tinker.SamplingParams(max_tokens=1, temperature=0.0)
        first_sample = old.sample(scored, 1, one_token).result().sequences[0].logprobs
        first_scores = old.compute_logprobs(scored).result()
        step(model, supervised_rows())
        model.save_weights_for_sampler("named").result()
        second_sample = old.sample(scored, 1, one_token).result().sequences[0].logprobs
        assert first_sample != second_sample
        assert first_scores != old.compute_logprobs(scored).result()
        base = client.create_sampling_client(base_model=str(server.model)).result()
        params = tinker.SamplingParams(max_tokens=8, temperature=1.0, seed=3)
        for source in (sampler, base, sampler):
            response = source.sample(prompt, 4, params).result()
            for sequence in response.sequences:
                tokens = list(sequence.tokens)
                whole = tinker.ModelInput.from_ints([5, 6, 7, *tokens])
                scores = source.compute_logprobs(whole).result()
                assert scores[0] is None
                assert scores[3:] == pytest.approx(list(sequence.logprobs), abs=1e-4)
        again = sampler.sample(prompt, 4, params).result()
        assert [s.tokens for s in again.sequences] == [
            s.tokens for s in response.sequences
        ]
        greedy = tinker.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
        [whole] = sampler.sample(prompt, 1, greedy).result().sequences
        assert (len(whole.tokens), whole.stop_reason) == (8, "length")
        third = int(whole.tokens[2])
        first = list(whole.tokens).index(third) + 1
        greedy = tinker.SamplingParams(max_tokens=8, temperature=0.0, stop=[third])
        [cut] = sampler.sample(prompt, 1, greedy).result().sequences
        assert list(cut.tokens) == list(whole.tokens)[:first]
        assert cut.stop_reason == "stop"
        text = model.get_tokenizer().decode([third])
        greedy = tinker.SamplingParams(max_tokens=8, temperature=0.0, stop=text)
        [cut] = sampler.sample(prompt, 1, greedy).result().sequences
        assert text in model.get_tokenizer().decode(list(cut.tokens))
        assert cut.stop_reason == "stop" and len(cut.tokens) <= first


def test_a_loss_of_the_clients_own_is_that_loss(server: Server) -> None:
    with connected(server) as client:
        model, other = new_model(client, server), new_model(client, server)

        def own(data: Any, log_probs: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
            return -2.0 * torch.cat(log_probs).sum(), {"mine": 1.0}

        output = model.forward_backward_custom(supervised_rows(), own).result()
        stepped = model.optim_step(tinker.AdamParams(**ADAM)).result()
        expected, expected_step = step(other, supervised_rows())
        assert output.metrics["mine"] == 1.0
        twice = 2 * expected.metrics["loss:sum"]
        assert output.metrics["loss:sum"] == pytest.approx(twice, rel=1e-6)
        norm = 2 * expected_step.metrics["grad_norm"]
        assert stepped.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_wrong_requests_are_refused_in_words_and_change_nothing(server: Server) -> None:
    with connected(server) as client:
        model = new_model(client, server)
        good = supervised_rows()
        before = model.forward(good, "cross_entropy").result().metrics
        bad = datum([5, 60_000], weights=[1.0])
        far = datum(policy(1), logprobs=[-2000.0] * 8, advantages=[1.0] * 8)
        wrong = [
            (lambda: model.forward_backward([bad], "cross_entropy"), "token 60000"),
            (lambda: model.forward_backward(good, "ppo"), "lacks logprobs, advantages"),
            (lambda: model.forward_backward([far], "importance_sampling"), "inf"),
            (lambda: model.optim_step(tinker.AdamParams(beta1=1.0)), "betas"),
            (lambda: model.save_state("../escape"), "cannot name"),
            (
                lambda: client.create_lora_training_client(
                    base_model=str(server.model), rank=RANK + 1
                ),
                f"rank {RANK}",
            ),
            (
                lambda: client.create_lora_training_client(
                    base_model="other/model", rank=RANK
                ),
                "this server trains",
            ),
            (
                lambda: client.create_training_client_from_state(
                    "tinker://nobody/weights/x"
                ),
                "does not exist",
            ),
        ]
        for make, message in wrong:
            with pytest.raises(tinker.RequestFailedError, match=message):
                make().result()
        assert model.forward(good, "cross_entropy").result().metrics == before
        base = client.create_sampling_client(base_model=str(server.model)).result()
        prompt = tinker.ModelInput.from_ints([5] * 390)
        with pytest.raises(tinker.BadRequestError, match="does not fit"):
            base.sample(prompt, 1, tinker.SamplingParams(max_tokens=50)).result()
        with pytest.raises(tinker.BadRequestError, match="topk_prompt_logprobs"):
            base.sample(
                tinker.ModelInput.from_ints([5]),
                1,
                tinker.SamplingParams(max_tokens=1),
                topk_prompt_logprobs=2,
            ).result()
    # The session is over, and so are its models.
    late = httpx.post(
        f"{server.url}/api/v1/optim_step",
        headers={"X-API-Key": KEY},
        json={"model_id": model.model_id, "seq_id": 99},
    )
    assert late.status_code == 410 and "over" in late.json()["detail"]


def policy(first: int) -> list[int]:
    return list(range(first, first + 9))


def test_only_the_exact_key_is_let_in(server: Server) -> None:
    for key in ("tml-secre", "tml-secret2", "tml-SECRET"):
        with pytest.raises(tinker.AuthenticationError):
            new_model(server.client(key), server)
    url = f"{server.url}/api/v1/healthz"
    assert httpx.get(url).status_code == 401
    known = {"X-API-Key": KEY}
    assert httpx.get(url, headers=known).json() == {"status": "ok"}
    assert httpx.get(f"{server.url}/other", headers=known).status_code == 404
    broken = httpx.post(
        f"{server.url}/api/v1/optim_step", headers=known, content=b"{not json"
    )
    assert broken.status_code == 400
    garbled = httpx.post(
        f"{server.url}/api/v1/forward_backward", headers=known, content=b"\xff\xff"
    )
    assert garbled.status_code == 400
    gone = httpx.post(
        f"{server.url}/api/v1/retrieve_future", headers=known, json={"request_id": "x"}
    )
    assert gone.status_code == 410 and "unknown" in gone.json()["detail"]


def test_metrics_are_numbers_and_the_server_says_what_it_trains(server: Server) -> None:
    with connected(server) as client:
        model = new_model(client, server)
        info = model.get_info()
        assert (info.is_lora, info.lora_rank) == (True, RANK)
        assert info.model_data.tokenizer_id == str(server.model)
        _, stepped = step(model, supervised_rows())
        assert stepped.metrics["step"] == 1.0
        assert all(math.isfinite(value) for value in stepped.metrics.values())
        config = json.loads(
            (
                server.adapter(model.save_weights_for_sampler("x").result().path)
                / "adapter_config.json"
            ).read_text()
        )
        assert (config["r"], config["lora_alpha"]) == (RANK, 8)


@pytest.mark.parametrize(
    "recipe", [recipes.supervised, recipes.rl_on_arithmetic, recipes.preferences]
)
def test_recipes_of_the_cookbook_run_unchanged(
    recipe: Callable[[Server, Path], None],
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("tinker_cookbook")
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    recipe(server, tmp_path)


def test_what_was_saved_outlives_a_killed_server(server: Server) -> None:
    model = new_model(server.client(), server)
    step(model, supervised_rows())
    path = model.save_state("state").result().path
    expected = step(model, supervised_rows())[0].metrics
    model.save_state("half")
    server.end(signal.SIGKILL)
    server.start()
    with connected(server) as client:
        restored = client.create_training_client_from_state_with_optimizer(path)
        assert step(restored.result(), supervised_rows())[0].metrics == expected
    weights = server.adapter(path).parents[1]
    assert {folder.name for folder in weights.iterdir()} <= {"state", "half"}
