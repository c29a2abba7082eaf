"""Divergences over the whole vocabulary, some tokens at a time: those of whole log-probs, and their gradients."""

from __future__ import annotations

import pytest
import torch

from megaverl.algorithms import divergences
from megaverl.models import vocab_divergence
from megaverl.models.vocab_divergence import vocab_parallel_divergence
from megaverl.models.vocab_parallel import Distributions

ROWS, WIDTH, VOCAB, PADDED = 40, 6, 11, 13


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", divergences)
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("top_k", "softcap"), [(None, None), (4, 2.0), (99, None)])
def test_the_same_as_of_whole_log_probs(
    name: str,
    chunked: bool,
    top_k: int | None,
    softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The student as logits, and as hidden states with an output layer; in chunks of 16 tokens, the last one short.

    Of the teacher's k likeliest tokens alone: the same of logits that have no other
    columns, row by row.
    """
    monkeypatch.setattr(vocab_divergence, "CHUNK_BYTES", 1)
    hidden, weight = normal(2, ROWS, WIDTH, seed=0), normal(PADDED, WIDTH, seed=1)
    index = torch.randperm(2 * ROWS, generator=torch.Generator().manual_seed(2))[:37]
    taught, teachers = normal(37, 5, seed=3), normal(PADDED, 5, seed=4)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    student = Distributions(
        *((hidden, index, weight) if chunked else (hidden @ weight.t(), index)),
        softcap=softcap,
    )
    function = divergences.get(name).function
    teacher = Distributions(taught, torch.arange(37), teachers, softcap)
    found = vocab_parallel_divergence(
        student, teacher, function, vocab_size=VOCAB, temperature=0.7, top_k=top_k
    )
    logits = hidden.reshape(-1, WIDTH)[index] @ weight[:VOCAB].t()
    known = taught @ teachers[:VOCAB].t()
    if softcap is not None:
        logits, known = (softcap * torch.tanh(x / softcap) for x in (logits, known))
    kept = [
        sorted(range(VOCAB), key=row.__getitem__)[-(top_k or VOCAB) :]
        for row in known.tolist()
    ]
    rows = [
        function(
            (mine[columns] / 0.7).log_softmax(-1),
            (theirs[columns] / 0.7).log_softmax(-1),
        )
        for mine, theirs, columns in zip(logits, known, kept, strict=True)
    ]
    wanted = torch.stack(rows)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    upstream = normal(37, seed=5)
    for mine, theirs in zip(
        torch.autograd.grad(found @ upstream, leaves),
        torch.autograd.grad(wanted @ upstream, leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_no_tokens_and_no_columns() -> None:
    """A micro-batch that only fills up; and a rank whose columns are all padding."""
    nothing = torch.arange(0)
    teacher = Distributions(torch.zeros(0, 5), nothing, torch.zeros(PADDED, 5))
    logits = torch.zeros(1, 3, PADDED).requires_grad_()
    function = divergences.get("reverse_kl").function
    found = vocab_parallel_divergence(
        Distributions(logits, nothing), teacher, function, vocab_size=VOCAB
    )
    assert found.shape == (0,)
    found.sum().backward()
    assert logits.grad is not None and not logits.grad.any()
