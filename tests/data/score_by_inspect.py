"""Score `suite_responses.json` by inspect-ai, and write what it computes to `inspect_scores.json`.

Run it in an environment of its own, since inspect-ai is not among the packages of the
tests:

    pip install inspect-ai sympy antlr4-python3-runtime==4.13.2
    python tests/data/score_by_inspect.py

Each response is scored by the scorer that inspect's own version of the suite uses. Its
reducers and metrics give mean, pass@k and the standard error over prompts.
"""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any

from inspect_ai import Epochs, Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput
from inspect_ai.scorer import accuracy, choice, match, math, pass_at, stderr
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.solver._multiple_choice import (
    parse_answers,
    set_choices_based_on_generated_response,
)

HERE = Path(__file__).parent


@solver
def stored_response(has_choices: bool) -> Solver:
    """Answer with the stored response of the sample's epoch."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        text = state.metadata["responses"][state.epoch - 1]
        state.output = ModelOutput.from_content("stored", text)
        if has_choices:
            set_choices_based_on_generated_response(
                state=state, answers=parse_answers(state, multiple_correct=False)
            )
        return state

    return solve


def sample_of(suite: str, row: dict[str, Any]) -> Sample:
    """Return a row as inspect's version of the suite has it."""
    target = (
        row["answer"].rpartition("####")[2].strip()
        if suite == "gsm8k"
        else row["answer"]
    )
    metadata = {"responses": row["responses"]}
    return Sample(
        input=row["question"],
        target=target,
        choices=row.get("choices"),
        metadata=metadata,
    )


def scores_of(suite: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return correctness of every response, and mean, error and pass@k over prompts."""
    scorer = {"gsm8k": match(numeric=True), "gpqa": choice(), "math": math()}[suite]
    reducers = ["mean", pass_at(2), pass_at(4)]
    task = Task(
        dataset=[sample_of(suite, row) for row in rows],
        solver=stored_response(suite == "gpqa"),
        scorer=scorer,
        epochs=Epochs(4, reducers),
        metrics=[accuracy(), stderr()],
    )
    correct: list[list[bool | None]] = [[None] * 4 for _ in rows]
    # The samples are read from the log's file, so the folder must exist until then.
    with tempfile.TemporaryDirectory() as folder:
        [log] = eval(
            task, model="mockllm/model", log_dir=folder, display="none", max_samples=1
        )
        assert log.status == "success", log.error
        for sample in log.samples:
            [score] = sample.scores.values()
            correct[sample.id - 1][sample.epoch - 1] = score.value == "C"
    metrics = {
        f"{result.reducer}/{name}": metric.value
        for result in log.results.scores
        for name, metric in result.metrics.items()
    }
    return {"correct": correct, "metrics": metrics}


def main() -> None:
    """Write the scores of all suites."""
    stored = json.loads((HERE / "suite_responses.json").read_text(encoding="utf-8"))
    scores = {suite: scores_of(suite, rows) for suite, rows in stored.items()}
    content = {"inspect_ai": importlib.metadata.version("inspect-ai"), **scores}
    (HERE / "inspect_scores.json").write_text(
        json.dumps(content, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
