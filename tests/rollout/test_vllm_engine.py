"""vLLM itself, in two real processes: two replicas (TP1), or one of two ranks (TP2)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from megaverl.models.tiny import make_tiny_folder
from megaverl.rollout.engine import SamplingOptions
from megaverl.rollout.hf_engine import HFEngine, sampled_distribution
from megaverl.sharding.draft_head import HEAD_METHODS
from tests.draft_heads import make_heads
from tests.launcher import Launcher

RANKS = "tests.rollout.ranks"
# vLLM's CPU attention has no kernel for heads below 32 dimensions
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 160,
    "vocab_size": 150,
    "num_hidden_layers": 2,
}
PROMPTS = [[2 + i, 7, 5 * i + 3, 11, 4] * (1 + i % 3) for i in range(9)] + [
    list(range(2, 80))
] * 2
SEEDS = [1000 + i for i in range(len(PROMPTS))]
SAMPLING = {"max_tokens": 24, "temperature": 0.8}
REQUEST = {"prompts": PROMPTS, "seeds": SEEDS, "sampling": SAMPLING}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_folder(tmp_path_factory.mktemp("models") / "first", **SIZES))


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        make_tiny_folder(tmp_path_factory.mktemp("models") / "second", seed=1, **SIZES)
    )


def log_prob_error(
    folder: str,
    answers: list[dict[str, Any]],
    sampling: dict[str, Any] | list[dict[str, Any]],
) -> float:
    """Largest difference between the answers' log-probs and those of plain transformers in float32."""
    model = HFEngine(folder, dtype=torch.float32, max_model_len=128).model
    worst, ways = (
        0.0,
        sampling if isinstance(sampling, list) else [sampling] * len(PROMPTS),
    )
    for prompt, answer, way in zip(PROMPTS, answers, ways, strict=True):
        tokens = answer["token_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[
                0, len(prompt) - 1 : -1
            ]
        expected = sampled_distribution(logits, SamplingOptions(**way))
        expected = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        worst = max(
            worst, float((expected - torch.tensor(answer["log_probs"])).abs().max())
        )
    return worst


@pytest.fixture(scope="module", params=[1, 2])
def tp(request: pytest.FixtureRequest) -> int:
    """Of the engine; module scope, so that one engine at a time serves all its tests."""
    return int(request.param)


def test_what_is_drawn_depends_on_seed_and_not_on_company(
    launch: Launcher, folder: str
) -> None:
    count = len(PROMPTS)
    orders = [list(range(count)), list(reversed(range(count))), [4], [7, 0, 10]]
    requests = [
        {
            "prompts": [PROMPTS[i] for i in order],
            "seeds": [SEEDS[i] for i in order],
            "sampling": SAMPLING,
        }
        for order in orders
    ]
    others = REQUEST | {"seeds": [seed + 5000 for seed in SEEDS]}
    found = launch.world(
        2, f"{RANKS}:generate", folder=folder, tp=1, requests=[*requests, others]
    )[0]
    by_prompt = [answer["token_ids"] for answer in found[0]]
    for order, answers in zip(orders, found, strict=False):
        assert [answer["token_ids"] for answer in answers] == [
            by_prompt[i] for i in order
        ]
    changed = [
        answer["token_ids"] != before
        for answer, before in zip(found[-1], by_prompt, strict=True)
    ]
    assert all(changed)
    assert by_prompt[-1] != by_prompt[-2]  # one prompt, two seeds


def test_a_limit_of_sequences_at_once(launch: Launcher, folder: str) -> None:
    for found in launch.world(
        2, f"{RANKS}:generate_few_at_once", folder=folder, tp=1, request=REQUEST, most=3
    ):
        assert found["most"] == found["number"] == 3
        assert found["same"]


def test_stop_tokens_end_a_response_and_belong_to_it(
    launch: Launcher, folder: str
) -> None:
    free = REQUEST | {"sampling": SAMPLING | {"ignore_eos": True}}
    [unstopped] = launch.world(
        2, f"{RANKS}:generate", folder=folder, tp=1, requests=[free]
    )[0]
    assert {
        (len(answer["token_ids"]), answer["finish_reason"]) for answer in unstopped
    } == {(24, "length")}
    stop = unstopped[0]["token_ids"][5]
    stopping = REQUEST | {"sampling": SAMPLING | {"stop_token_ids": [stop]}}
    [stopped] = launch.world(
        2, f"{RANKS}:generate", folder=folder, tp=1, requests=[stopping]
    )[0]
    for whole, answer in zip(unstopped, stopped, strict=True):
        # 1: the engine's own.
        ends = [
            place
            for place, token in enumerate(whole["token_ids"])
            if token in (1, stop)
        ]
        length = ends[0] + 1 if ends else 24
        assert answer["token_ids"] == whole["token_ids"][:length]
        assert len(answer["log_probs"]) == length
        assert answer["finish_reason"] == ("stop" if ends else "length")
    assert stopped[0]["token_ids"][-1] == stop


def test_greedy(launch: Launcher, folder: str) -> None:
    sampling = {"max_tokens": 12, "temperature": 0.0}
    [answers] = launch.world(
        2,
        f"{RANKS}:generate",
        folder=folder,
        tp=1,
        requests=[REQUEST | {"sampling": sampling}],
    )[0]
    plain = HFEngine(folder, dtype=torch.float32, max_model_len=128, stop_token_ids=[1])
    expected = plain.generate(PROMPTS, SamplingOptions(**sampling), SEEDS)
    assert [answer["token_ids"] for answer in answers] == [
        found.token_ids for found in expected
    ]
    pairs = itertools.chain(
        *(
            zip(a["log_probs"], e.log_probs, strict=True)
            for a, e in zip(answers, expected, strict=True)
        )
    )
    assert max(abs(a - e) for a, e in pairs) < 1e-4


# A draft for every token that the prompt has: 33 of them, of which a whole block is
# cached and one is not.
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
REPEATED, COPIES = list(range(2, 35)), 500


def third_tokens(folder: str, prompt: list[int], way: SamplingOptions) -> torch.Tensor:
    """[vocabulary]: how likely each is as the third token after the prompt; but for those that almost never begin."""
    model = HFEngine(folder, dtype=torch.float32, max_model_len=128).model
    begun: dict[tuple[int, ...], float] = {(): 1.0}
    found = torch.zeros(SIZES["vocab_size"])
    for place in range(3):
        with torch.no_grad():
            logits = model(
                torch.tensor([[*prompt, *tokens] for tokens in begun])
            ).logits[:, -1]
        rows = (
            torch.tensor(list(begun.values()))[:, None]
            * sampled_distribution(logits, way).exp()
        )
        if place == 2:
            found = rows.sum(0)
        begun = {
            (*tokens, token): float(row[token])
            for tokens, row in zip(begun, rows, strict=True)
            for token in (row > 1e-5).nonzero()[:, 0].tolist()
        }
    return found


@pytest.fixture(scope="module")
def heads(folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Untrained heads of the model in `folder`, by vLLM's method."""
    made = make_heads(tmp_path_factory.mktemp("heads"), folder, spread=0.1)
    return {method: str(head) for method, head in made.items()}


@pytest.mark.parametrize("method", HEAD_METHODS)
def test_a_head_is_trained_as_vllm_runs_it(
    launch: Launcher, folder: str, heads: dict[str, str], method: str
) -> None:
    """The prompt's states, and the next two steps, which read the head's own."""
    [difference] = launch.world(
        1,
        f"{RANKS}:head_against_vllm",
        folder=folder,
        method=method,
        head=heads[method],
        prompt=PROMPTS[0],
    )
    assert difference < 1e-5


@pytest.mark.parametrize("method", ["ngram", "draft_model", *HEAD_METHODS])
def test_drafts_change_no_distribution(
    launch: Launcher, folder: str, heads: dict[str, str], method: str
) -> None:
    """Of tokens of the sample itself; of a draft model that proposes its likeliest token: here the same model; of a
    head.
    """
    speculation = {
        "ngram": NGRAM,
        "draft_model": {"model": folder, "num_speculative_tokens": 2},
        **{
            of_head: {"method": of_head, "model": head, "num_speculative_tokens": 2}
            for of_head, head in heads.items()
        },
    }[method]
    narrow, greedy = (
        SAMPLING | {"top_k": 20, "top_p": 0.9},
        SAMPLING | {"temperature": 0.0},
    )
    mixed = [
        narrow if number % 3 == 0 else greedy if number % 3 == 1 else SAMPLING
        for number in range(len(PROMPTS))
    ]
    turned = {
        name: list(reversed(each))
        for name, each in (REQUEST | {"sampling": mixed}).items()
    }  # type: ignore[call-overload]
    many = {
        "prompts": [REPEATED] * COPIES,
        "seeds": list(range(COPIES)),
        "sampling": {"max_tokens": 3},
    }
    many["sampling"] |= {"temperature": 0.1, "ignore_eos": True}
    given = {"folder": folder, "tp": 1, "speculation": speculation, "many": many}
    requests = [REQUEST | {"sampling": mixed}, turned]
    [one] = launch.world(1, f"{RANKS}:speculate", requests=requests, **given)
    each, back = one["answers"]
    assert log_prob_error(folder, each, mixed) < 1e-4
    # company and order change nothing; what is cached rounds otherwise
    assert [answer["token_ids"] for answer in each] == [
        answer["token_ids"] for answer in back[::-1]
    ]
    plain = HFEngine(folder, dtype=torch.float32, max_model_len=128, stop_token_ids=[1])
    expected = plain.generate(PROMPTS[1::3], SamplingOptions(**greedy), SEEDS[1::3])
    assert [answer["token_ids"] for answer in each[1::3]] == [
        found.token_ids for found in expected
    ]
    work = one["work"]
    share = work["accepted_tokens"] / work["draft_tokens"]
    # An untrained head is right by chance only.
    assert share < 1.0 and (share > 0.1 or method in heads)
    # vLLM computes the last cached block anew for a head, which reads its states.
    assert work["cached_tokens"] >= 32 * (COPIES - 1) * (method not in heads)
    likely = third_tokens(folder, REPEATED, SamplingOptions(**many["sampling"]))
    counts = torch.bincount(
        torch.tensor([tokens[2] for tokens in one["many"]]), minlength=len(likely)
    )
    seen = likely * COPIES > 5
    chi_square = ((counts - likely * COPIES)[seen] ** 2 / (likely * COPIES)[seen]).sum()
    assert chi_square < seen.sum() + 5 * (2 * seen.sum()) ** 0.5


def test_prefix_cache_is_not_reset_under_a_running_request(
    launch: Launcher, folder: str
) -> None:
    messages = launch.world(2, f"{RANKS}:reset_while_running", folder=folder)
    assert all("did not reset its prefix cache" in message for message in messages)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            {"prompts": [[3], []], "seeds": [0, 1], "sampling": SAMPLING},
            "prompt 1 is empty",
        ),
        (
            REQUEST | {"sampling": {"max_tokens": 4, "top_p": 1.5}},
            "vLLM refuses SamplingOptions(max_tokens=4",
        ),
        (
            REQUEST | {"sampling": {"max_tokens": 4, "heat": 1}},
            "Unexpected keyword argument 'heat'",
        ),
    ],
)
def test_refused_requests(
    launch: Launcher, folder: str, request_: dict[str, Any], message: str
) -> None:
    for found in launch.world(
        2, f"{RANKS}:refusal", folder=folder, tp=1, request=request_
    ):
        assert message in found


def test_log_probs_are_those_of_transformers(
    launch: Launcher, folder: str, tp: int
) -> None:
    narrow, greedy = (
        SAMPLING | {"top_k": 20, "top_p": 0.9},
        SAMPLING | {"temperature": 0.0},
    )
    mixed = [
        narrow if number % 3 == 0 else greedy if number % 3 == 1 else SAMPLING
        for number in range(len(PROMPTS))
    ]
    requests = [
        REQUEST | {"sampling": sampling} for sampling in (SAMPLING, narrow, mixed)
    ]
    ranks = launch.world(
        2, f"{RANKS}:generate", folder=folder, tp=tp, requests=requests
    )
    # TP2: every rank has the replica's answer; TP1: same request, same answer.
    assert ranks[0] == ranks[1]
    plain, filtered, each = ranks[0]
    assert log_prob_error(folder, each, mixed) < 1e-4
    # What is drawn does not depend on how the others are.
    for number, answer in enumerate(each):
        if number % 3 != 1:
            assert (
                answer["token_ids"]
                == (filtered if number % 3 == 0 else plain)[number]["token_ids"]
            )
    assert log_prob_error(folder, plain, SAMPLING) < 1e-4
    assert log_prob_error(folder, filtered, narrow) < 1e-4
    assert plain != filtered


def test_weights_written_in_place_take_effect(
    launch: Launcher, folder: str, other_folder: str, tp: int
) -> None:
    found = launch.world(
        2,
        f"{RANKS}:change_weights",
        folder=folder,
        other_folder=other_folder,
        tp=tp,
        request=REQUEST,
    )[0]
    assert log_prob_error(folder, found["before"], SAMPLING) < 1e-4
    assert log_prob_error(other_folder, found["after"], SAMPLING) < 1e-4
    assert found["again"] == found["before"]
    assert found["in_place"]


def test_ranks_of_a_replica_must_agree(launch: Launcher, folder: str) -> None:
    for message in launch.world(2, f"{RANKS}:ranks_that_disagree", folder=folder):
        assert "replica 0: ranks [1] were given other prompts" in message


def test_closed_engine_frees_groups_and_says_so(launch: Launcher, folder: str) -> None:
    """What a killed rank would leave behind is in the world's temporary folder, or has no name."""
    found = launch.world(2, f"{RANKS}:after_close", folder=folder)
    for rank, answer in enumerate(found):
        assert answer.pop("queue") == [1, 0]
        temporary = answer.pop("temporary")
        # The other rank connects to the first one's.
        assert answer.pop("sockets") == ([] if rank else [temporary])
    expected = {"message": "the engine is closed.", "world": 2, "shared_memory": []}
    assert found == [expected] * 2


def test_process_is_left_as_it_was(launch: Launcher, folder: str) -> None:
    found = launch.world(2, f"{RANKS}:state_around", folder=folder)
    assert found == [{"start": [], "generate": [], "close": []}] * 2


def test_engine_without_weights_is_filled(launch: Launcher, folder: str) -> None:
    found = launch.world(
        2, f"{RANKS}:unset_then_filled", folder=folder, tp=1, request=REQUEST
    )[0]
    assert (
        found["refusal"]
        == "the engine has no weights yet: reshard before the first generate()."
    )
    assert log_prob_error(folder, found["filled"], SAMPLING) < 1e-4


def test_no_process_is_started_to_look_at_a_model(
    launch: Launcher, folder: str
) -> None:
    assert launch.world(2, f"{RANKS}:looked_at_elsewhere", folder=folder) == [0, 0]


def test_refused_engine_arguments(launch: Launcher, folder: str) -> None:
    for found in launch.world(
        2, f"{RANKS}:refusal", folder=folder, tp=1, vllm={"block_size": -1}
    ):
        assert "vLLM refuses to start" in found
    for found in launch.world(
        2, f"{RANKS}:refusal", folder=folder, tp=1, vllm={"enforce_eager": False}
    ):
        assert "rollout.vllm.enforce_eager=false" in found
    for found in launch.world(
        2, f"{RANKS}:refusal", folder=folder, tp=1, vllm={"async_scheduling": True}
    ):
        assert "rollout.vllm.async_scheduling=true" in found


def test_a_field_that_vllm_misses_in_config_json_is_named(
    launch: Launcher, tmp_path: Path
) -> None:
    """vLLM 0.32 reads the published model's fields, transformers 5.19 writes others."""
    from transformers import MiMoV2FlashConfig

    sizes = {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "n_routed_experts": 4,
    }
    MiMoV2FlashConfig(
        **sizes, vocab_size=160, architectures=["MiMoV2FlashForCausalLM"]
    ).save_pretrained(tmp_path)
    for found in launch.world(1, f"{RANKS}:refusal", folder=tmp_path, tp=1, fresh=True):
        assert (
            "vLLM does not build the model of" in found
            and "'hybrid_layer_pattern'" in found
        )


@pytest.mark.parametrize(
    ("tp", "changes", "message"),
    [
        (
            3,
            {},
            "rollout.tp=3 does not divide the world of 2 ranks. Choose one of [1, 2]",
        ),
        (
            2,
            {
                "hidden_size": 288,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
            },
            "does not divide the model's 9 attention heads",
        ),
        (
            1,
            {"max_position_embeddings": 100},
            "128 tokens were asked for, but the model's context is 100",
        ),
        (
            1,
            {"num_attention_heads": 8},
            "heads have 16 dimensions; vLLM's CPU attention has kernels for 32, 64",
        ),
    ],
)
def test_models_that_cannot_run(
    launch: Launcher, tmp_path: Path, tp: int, changes: dict[str, Any], message: str
) -> None:
    model = make_tiny_folder(tmp_path, **(SIZES | changes))
    for found in launch.world(2, f"{RANKS}:refusal", folder=model, tp=tp):
        assert message in found


def test_the_cache_holds_what_a_step_can_use(launch: Launcher, folder: str) -> None:
    """Sixteen responses of 128 tokens and a quarter more, in the 1 GiB that vLLM may take. A size that is set stays."""
    first, second = launch.world(2, f"{RANKS}:cache_tokens", folder=folder)
    block = first["block"]
    assert first["tokens"] == second["tokens"] == 16 * 128 * 5 // 4 + block
    [told] = first["told"]
    assert (
        "enough for 16 responses of full length" in told
        and "1.07 GB would be free" in told
    )
    assert second["told"] == []
    given = launch.world(
        2, f"{RANKS}:cache_tokens", folder=folder, kv_cache_memory_bytes=50_000_000
    )
    assert [found["told"] for found in given] == [[], []]
    # On a CPU vLLM prefers the variable's GiB to the argument.
    assert given[0]["tokens"] == 2**30 // (2 * 2 * 64 * 4)
