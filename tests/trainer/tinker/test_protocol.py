"""Losses against their formulas, messages against the client's own code, and names of checkpoints."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megaverl.algorithms.summed_losses import SUMMED_LOSSES
from megaverl.trainer.tinker.checkpoints import Saved, SavedCheckpoints, SavedPath
from megaverl.trainer.tinker.messages import CallOutcome
from megaverl.trainer.tinker.promises import Promises, RequestFailed
from megaverl.trainer.tinker.protocol import (
    ForwardBackward,
    forward_backward_output,
    sample_response,
)
from tests.trainer.tinker.server import datum

tinker = pytest.importorskip("tinker")


def test_losses_of_single_tokens_are_those_of_their_formulas() -> None:
    log_prob, old, advantage = -1.0, -1.5, 2.0
    ratio = math.exp(log_prob - old)
    inputs = {
        "weights": torch.tensor([[0.5]]),
        "logprobs": torch.tensor([[old]]),
        "advantages": torch.tensor([[advantage]]),
    }
    expected = {
        "cross_entropy": -0.5 * log_prob,
        "importance_sampling": -ratio * advantage,
        # The ratio of 1.65 is above the upper limit of 1.2.
        "ppo": -1.2 * advantage,
        "cispo": -1.2 * advantage * log_prob,
        "dro": -(log_prob * advantage - 0.5 * 0.05 * 0.25),
    }
    assert set(expected) == set(SUMMED_LOSSES)
    for name, value in expected.items():
        loss = SUMMED_LOSSES[name](torch.tensor([[log_prob]]), inputs, {})
        assert float(loss) == pytest.approx(value, rel=1e-6), name


def test_a_clipped_token_has_no_gradient_in_ppo_and_a_bounded_one_in_cispo() -> None:
    inputs = {"logprobs": torch.tensor([[-1.5]]), "advantages": torch.tensor([[2.0]])}
    gradients = {}
    for name in ("ppo", "cispo", "importance_sampling"):
        log_probs = torch.tensor([[-1.0]], requires_grad=True)
        SUMMED_LOSSES[name](log_probs, inputs, {}).sum().backward()
        assert log_probs.grad is not None
        gradients[name] = float(log_probs.grad)
    assert gradients["ppo"] == 0.0
    assert gradients["cispo"] == pytest.approx(-1.2 * 2.0)
    assert gradients["importance_sampling"] == pytest.approx(-2.0 * math.exp(0.5))


def request(*data: Any, loss: str = "cross_entropy", **options: float) -> bytes:
    from tinker.proto.request_conv import forward_backward_request_to_proto

    made = tinker.types.ForwardBackwardRequest(
        forward_backward_input=tinker.types.ForwardBackwardInput(
            data=list(data), loss_fn=loss, loss_fn_config=options or None
        ),
        model_id="m",
        seq_id=3,
    )
    encoded: bytes = forward_backward_request_to_proto(made).SerializeToString()
    return encoded


def test_rows_are_read_as_the_client_wrote_them() -> None:
    read = ForwardBackward(
        request(datum([1, 2, 3], weights=[0.0, 1.5]), datum([4, 5], weights=[1.0]))
    )
    assert (read.model, read.number, read.trains) == ("m", 3, True)
    rows = read.rows(vocab_size=10, max_tokens=8)
    assert rows.tokens == [[1, 2], [4]]
    assert rows.targets == [[2, 3], [5]]
    assert rows.inputs == {"weights": [[0.0, 1.5], [1.0]]}
    options = ForwardBackward(
        request(datum([1, 2], weights=[1]), loss="ppo", clip_low_threshold=0.5)
    ).loss()
    assert (options.name, options.options) == ("ppo", {"clip_low_threshold": 0.5})


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        (lambda: request(datum([1, 99], weights=[1])), "token 99"),
        (lambda: request(datum([1, 2])), "lacks weights"),
        (lambda: request(datum([1, 2, 3], weights=[1.0])), "1 values for 2 tokens"),
        (lambda: request(datum([1, 2], weights=[math.nan])), "not finite"),
        (lambda: request(datum([1] * 9, weights=[1] * 8)), "fewer than 8"),
        (lambda: request(datum([1, 2], weights=[1]), loss="gspo"), "not one of"),
        (lambda: request(datum([1, 2], weights=[1]), wrong=1.0), "no options"),
        (lambda: request(), "no data"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused(encoded: Any, message: str) -> None:
    with pytest.raises(RequestFailed, match=message):
        ForwardBackward(encoded()).rows(vocab_size=10, max_tokens=8)


def test_results_are_read_by_the_client_as_they_were_written() -> None:
    from tinker.proto.response_conv import deserialize_proto_response

    outcome = CallOutcome(
        log_probs=[[-1.0, -2.5], [-0.5]],
        tokens=[[7, 8], [9]],
        stopped=[True, False],
        numbers={"loss:sum": 4.0},
    )
    output: Any = deserialize_proto_response(
        forward_backward_output(outcome), tinker.types.ForwardBackwardOutput
    )
    assert output.metrics == {"loss:sum": 4.0}
    assert [row["logprobs"].data for row in output.loss_fn_outputs] == [
        [-1.0, -2.5],
        [-0.5],
    ]
    response: Any = deserialize_proto_response(
        sample_response(outcome, [-3.0]), tinker.types.SampleResponse
    )
    assert [list(sequence.tokens) for sequence in response.sequences] == [[7, 8], [9]]
    assert [s.stop_reason for s in response.sequences] == ["stop", "length"]
    assert list(response.prompt_logprobs) == [None, -3.0]


def test_names_of_checkpoints_stay_in_their_folder(tmp_path: Path) -> None:
    path = SavedPath.parse("tinker://s:train:0/weights/best-1")
    assert path == ("s:train:0", "weights", "best-1")
    for wrong in (
        "s:train:0/weights/x",
        "tinker://m/weights/..",
        "tinker://../weights/x",
        "tinker://m/weights/a/b",
        "tinker://m/other/x",
        "tinker://m/weights/",
    ):
        with pytest.raises(RequestFailed, match="names no checkpoint"):
            SavedPath.parse(wrong)
    saved = SavedCheckpoints(tmp_path)
    with pytest.raises(RequestFailed, match="cannot name"):
        saved.begin(SavedPath("m", "weights", "../x"), overwrite=False)


def test_a_checkpoint_appears_whole_and_expires(tmp_path: Path) -> None:
    saved = SavedCheckpoints(tmp_path)
    path = SavedPath("m", "weights", "a")
    partial = saved.begin(path, overwrite=False)
    assert saved.describe("m") == []
    saved.commit(path, partial, Saved("base", 4, created=1.0, user_metadata={"k": "v"}))
    [entry] = saved.describe("m")
    assert entry["tinker_path"] == str(path) and entry["user_metadata"] == {"k": "v"}
    with pytest.raises(RequestFailed, match="overwrite=True"):
        saved.begin(path, overwrite=False)
    # A killed server leaves this behind; the next one removes it.
    half = saved.begin(SavedPath("m", "weights", "b"), overwrite=False)
    assert half.is_dir()
    saved = SavedCheckpoints(tmp_path)
    assert not half.exists() and saved.find(path).lora_rank == 4
    expired = Saved("base", 4, created=1.0, expires=time.time() - 1)
    saved.commit(path, saved.begin(path, overwrite=True), expired)
    with pytest.raises(RequestFailed, match="expired"):
        saved.find(path)
    saved.delete_expired()
    assert not saved.folder(path).exists()


def test_only_the_newest_snapshots_are_kept(tmp_path: Path) -> None:
    saved = SavedCheckpoints(tmp_path)
    for number in range(4):
        path = SavedPath("m", "sampler_weights", f"snapshot_{number}")
        described = Saved("base", 4, created=float(number), is_ephemeral=True)
        saved.commit(path, saved.begin(path, overwrite=True), described)
    saved.delete_ephemeral("m", keep=2)
    left = sorted(path.name for path in (tmp_path / "m/sampler_weights").iterdir())
    assert left == ["snapshot_2", "snapshot_3"]


def test_settled_promises_are_forgotten_in_time() -> None:
    promises = Promises(keep_seconds=0.0)
    first = promises.add()
    assert promises.find(first.id) is first
    second = promises.add()
    # The first one is not settled yet, and is kept.
    assert promises.find(first.id) is first
    first.fulfil({})
    promises.add()
    assert promises.find(first.id) is None
    assert promises.find(second.id) is second
