"""`megaverl eval` and `megaverl train` with tasks of harnesses, on real engines."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from megaverl.monitoring import report
from megaverl.monitoring.evaluations import HarnessResult, read_suites
from tests.launcher import Launcher
from tests.rollout.sglang_server import SGLangLike
from tests.trainer.conftest import REWARD
from tests.trainer.harness.environment import harness_python
from tests.trainer.tinker.server import MODEL
from tests.workers.tokenizers_made import of_bytes

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
ROWS = [
    {"question": "1+1=", "answer": "2", "choices": ["2", "3", "40"], "label": 0},
    {"question": "2+2=", "answer": "4", "choices": ["1", "4"], "label": 1},
    {"question": "3+4 =", "answer": "7", "choices": ["78", "8"], "label": 0},
    {"question": "9-1=", "answer": "8", "choices": ["80", "8", "7"], "label": 1},
]
ARITHMETIC = """
from inspect_ai import Epochs, Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def arithmetic():
    rows = [("1+1=", "2"), ("2+2=", "4"), ("3+4 =", "7"), ("9-1=", "8")]
    return Task(
        dataset=[Sample(input=question, target=answer) for question, answer in rows],
        solver=generate(max_tokens=40, temperature=0.0),
        scorer=includes(),
        version=3,
    )
"""
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {output_type}
doc_to_text: "{{{{question}}}}"
metadata: {{version: 2.0}}
"""
GENERATE = """
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["a"], max_gen_toks: 40}
metric_list: [{metric: exact_match}]
"""
CHOOSE = """
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
GROUP = "group: sums\ntask: [sum_generate, sum_choose]\n"
# Stands in the place of a harness: scores one completion by its log-prob.
INTERPRETER = """#!{python}
import json, sys, urllib.request
request = json.load(sys.stdin)
if request["task"] == "broken":
    sys.exit(3)
body = {{"prompt": "1+1=", "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}}
call = urllib.request.Request(
    request["base_url"] + "/v1/completions",
    json.dumps(body).encode(),
    {{"Authorization": "Bearer " + request["token"]}},
)
[choice] = json.load(urllib.request.urlopen(call))["choices"]
score = {{"metric": "log_prob", "value": choice["logprobs"]["token_logprobs"][1]}}
result = {{"name": "first", "harness": "own 1", "version": 1, "num_samples": 1}}
with open(request["results"], "w") as file:
    json.dump({{"results": [result | {{"scores": [score], "samples": []}}]}}, file)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer has a chat template."""
    from megaverl.models.tiny import make_tiny_folder

    folder = tmp_path_factory.mktemp("harness") / "model"
    tokenizer = of_bytes(chat_template=TEMPLATE)
    sizes: dict[str, Any] = {
        "eos_token_id": tokenizer.eos_token_id,
        "vocab_size": tokenizer.vocab_size,
    }
    make_tiny_folder(folder, "Qwen3ForCausalLM", **MODEL, **sizes)
    tokenizer.save(folder)
    return folder


def arguments(model: Path, runs: Path, *more: str) -> list[str]:
    return [
        "--config=",
        f"model.path={model}",
        "model.dtype=float32",
        f"run.dir={runs}",
        "data.max_prompt_tokens=64",
        "rollout.sampling.max_tokens=48",
        *more,
    ]


def tasks_of_lm_eval(folder: Path) -> Path:
    """A folder with two tasks and their group."""
    folder.mkdir()
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    kinds = {
        "sum_generate": ("generate_until", GENERATE),
        "sum_choose": ("multiple_choice", CHOOSE),
    }
    for name, (output_type, rest) in kinds.items():
        head = TASK.format(name=name, file=file, output_type=output_type)
        (folder / f"{name}.yaml").write_text(head + rest)
    (folder / "sums.yaml").write_text(GROUP)
    return folder


def write_interpreter(folder: Path) -> Path:
    """A program in the place of a harness's interpreter."""
    file = folder / "interpreter"
    file.write_text(INTERPRETER.format(python=sys.executable))
    file.chmod(0o755)
    return file


class ByTransformers:
    """What transformers computes of the same model."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.tokenizer = of_bytes(chat_template=TEMPLATE)

    def text(self, prompt: str, stop: str | None = None) -> str:
        """The greedy response of 40 tokens, up to a stop string."""
        import torch

        tokens = torch.tensor([self.tokenizer.encode(prompt)])
        written = self.model.generate(
            tokens, max_new_tokens=40, do_sample=False, pad_token_id=0
        )
        text = self.tokenizer.decode(written[0, tokens.shape[1] :].tolist())
        return text if stop is None else text.split(stop)[0]

    def log_likelihood(self, context: str, continuation: str) -> float:
        """The log-prob of a continuation."""
        import torch

        whole = self.tokenizer.encode(context + continuation)
        first = len(self.tokenizer.encode(context))
        with torch.no_grad():
            log_probs = self.model(torch.tensor([whole])).logits[0].log_softmax(-1)
        return math.fsum(
            float(log_probs[place - 1, whole[place]])
            for place in range(first, len(whole))
        )


def test_both_harnesses_on_two_engines(
    launch: Launcher, model: Path, tmp_path: Path
) -> None:
    """Their samples have what transformers generates, and their scores are those of a count by hand."""
    python = harness_python()
    (tmp_path / "own.py").write_text(ARITHMETIC)
    folder = tasks_of_lm_eval(tmp_path / "tasks")
    options = json.dumps({"lm-eval": {"include_path": str(folder)}})
    tasks = json.dumps([f"inspect:{tmp_path / 'own.py'}@arithmetic", "lm-eval:sums"])
    world = launch.world(
        2,
        "tests.trainer.ranks:attempt",
        command="eval",
        arguments=arguments(
            model,
            tmp_path / "runs",
            f"evaluation.tasks={tasks}",
            f"evaluation.harness_options={options}",
            f"evaluation.harness_python={python}",
        ),
    )
    assert world == [{}, {}]
    results = read_suites(tmp_path / "runs" / "run")
    assert sorted(results) == [
        "inspect:arithmetic",
        "lm-eval:sum_choose",
        "lm-eval:sum_generate",
    ]
    expected = ByTransformers(model)
    chats, choices, texts = (results[name] for name in sorted(results))
    assert isinstance(chats, HarnessResult) and chats.version == "3"
    assert chats.harness.startswith("inspect-ai 0.")
    responses = [expected.text(row["question"]) for row in ROWS]
    assert [sample["output"] for sample in chats.samples] == responses
    right = [row["answer"] in text for row, text in zip(ROWS, responses, strict=True)]
    assert chats.estimate("accuracy").value == pytest.approx(sum(right) / 4)

    assert isinstance(texts, HarnessResult) and texts.num_samples == 4
    until = [[expected.text(row["question"], stop="a")] for row in ROWS]
    assert [json.loads(sample["output"]) for sample in texts.samples] == [
        [text for [text] in [written]] for written in until
    ]

    assert isinstance(choices, HarnessResult) and choices.version == "2.0"
    chosen, by_length = [], []
    for row, sample in zip(ROWS, choices.samples, strict=True):
        likelihoods = [
            # lm-eval puts a space in between.
            expected.log_likelihood(row["question"], f" {choice}")
            for choice in row["choices"]
        ]
        for [given, _], own in zip(
            json.loads(sample["output"]), likelihoods, strict=True
        ):
            assert given == pytest.approx(own, abs=2e-3)
        chosen.append(_largest(likelihoods) == row["label"])
        lengths = map(len, row["choices"])
        normed = [a / b for a, b in zip(likelihoods, lengths, strict=True)]
        by_length.append(_largest(normed) == row["label"])
    assert list(choices.values("acc").values()) == chosen
    assert list(choices.values("acc_norm").values()) == by_length
    metrics = json.loads((tmp_path / "runs" / "run" / "eval.json").read_text())
    assert metrics["lm-eval:sum_choose/acc"] == sum(chosen) / 4
    page = report.write_report([tmp_path / "runs" / "run"], tmp_path / "report.html")
    assert "<td>lm-eval:sum_choose</td><td>acc</td>" in page.read_text()


def _largest(values: list[float]) -> int:
    return values.index(max(values))


def test_tasks_at_validations_of_a_run(
    launch: Launcher, model: Path, tmp_path: Path
) -> None:
    """The engine has the current weights, training does not change, and a task that fails does not end the run."""
    interpreter = write_interpreter(tmp_path)
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": row["question"], "answer": row["answer"]}) + "\n"
            for row in ROWS
        )
    )
    histories = {}
    for name in ("with", "without"):
        more = [
            f"run.name={name}",
            f"data.train={rows}",
            "data.prompts_per_step=4",
            f"reward={json.dumps({'function': f'{reward}:letters'})}",
            "trainer.steps=2",
            "actor.optimizer.lr=1.0e-2",
            "rollout.sampling.max_tokens=8",
        ]
        if name == "with":
            more += [
                "evaluation.tasks=[lm-eval:broken, lm-eval:first]",
                f"evaluation.harness_python={interpreter}",
                "trainer.validate_every=1",
                "trainer.validate_at_start=true",
            ]
        world = launch.world(
            2,
            "tests.trainer.ranks:attempt",
            command="train",
            arguments=arguments(model, tmp_path / "runs", *more),
        )
        assert world == [{}, {}]
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        histories[name] = [json.loads(line) for line in lines]
    key = "evaluation/lm-eval:first/log_prob"
    scores = [record[key] for record in histories["with"] if key in record]
    assert len(scores) == 3
    # Before the first step, and after the last one.
    trained = tmp_path / "runs" / "with" / "hf"
    for score, folder in ((scores[0], model), (scores[-1], trained)):
        expected = ByTransformers(folder).log_likelihood("1", "+")
        assert score == pytest.approx(expected, abs=2e-3)
    assert abs(scores[0] - scores[-1]) > 1e-2, "the weights have changed"
    weights = [
        (tmp_path / "runs" / name / "hf" / "model.safetensors").read_bytes()
        for name in ("with", "without")
    ]
    assert weights[0] == weights[1]


def test_a_served_model_and_a_task_that_fails(
    launch: Launcher, model: Path, tmp_path: Path
) -> None:
    interpreter = write_interpreter(tmp_path)
    with SGLangLike(model, context_length=112) as server:
        given = [
            "eval",
            *("--harness", "lm-eval", "--task", "first", "--url", server.url),
            *arguments(model, tmp_path / "runs")[1:],
            "rollout.servers.kind=sglang",
            f"evaluation.harness_python={interpreter}",
        ]
        launch.command(given, ranks=1, logs=tmp_path / "logs").check()
        [result] = read_suites(tmp_path / "runs" / "run").values()
        expected = ByTransformers(model).log_likelihood("1", "+")
        value = result.estimate("log_prob").value
        assert value == pytest.approx(expected, abs=2e-3)
        interpreter.write_text("#!/bin/sh\nexit 3\n")
        ended = launch.command(given, ranks=1, logs=tmp_path / "logs")
        assert ended.codes == [1]
        assert "lm-eval:first: the harness ended with 3" in ended.text
