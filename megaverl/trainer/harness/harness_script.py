"""Script of a harness's process. It imports nothing of megaverl, so that another environment can run it.

    python -P harness_script.py < request.json

The request has the fields of `harness_process.HarnessRequest`. The results are written
to the file that it names: {"results": [...]} or {"error": "..."}.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Calls that a harness makes at the same time.
CONCURRENT_CALLS = 64
# Packages by harness, and the extra of megaverl that installs them.
PACKAGES = {"inspect": "inspect-ai", "lm-eval": "lm-eval"}
MODULES = {"inspect": "inspect_ai", "lm-eval": "lm_eval"}
PROVIDER = "megaverl"  # of the model, as inspect-ai's logs name it
LONGEST_TEXT = 20_000  # characters of a sample's text that are kept


class TaskFailed(Exception):
    """A task that cannot be evaluated; the message is for the user."""


def run_inspect(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Evaluate a task with inspect-ai, and return its results."""
    from inspect_ai import eval as evaluate
    from inspect_ai.model import get_model

    register_engine_model()
    model = get_model(
        f"{PROVIDER}/{request['model']}",
        base_url=f"{request['base_url']}/v1",
        api_key=request["token"],
        memoize=False,
        seconds=request["minutes"] * 60,
    )
    options = {
        "display": "plain",
        "limit": request["limit"],
        "log_dir": request["folder"],
        "log_format": "eval",
        "max_connections": CONCURRENT_CALLS,
        "max_samples": CONCURRENT_CALLS,
        **request["options"],
    }
    try:
        logs = evaluate(request["task"], model=model, **options)
    except Exception as error:
        # "Task not found" and the like.
        raise TaskFailed(f"{type(error).__name__}: {error}") from error
    if not logs:
        raise TaskFailed(f"inspect-ai knows no task {request['task']!r}.")
    return [inspect_result(log, request) for log in logs]


def register_engine_model() -> None:
    """Register the run's engines as a provider of models of inspect-ai.

    Its own provider for OpenAI's API needs version 3 of the package openai, with which
    a run need not be compatible.
    """
    import httpx
    from inspect_ai.model import (
        ChatCompletionChoice,
        ChatMessage,
        GenerateConfig,
        ModelAPI,
        ModelOutput,
        ModelUsage,
        modelapi,
    )
    from inspect_ai.tool import ToolChoice, ToolInfo

    @modelapi(name=PROVIDER)
    class EngineModel(ModelAPI):  # type: ignore[misc, unused-ignore]
        def __init__(
            self,
            model_name: str,
            base_url: str | None = None,
            api_key: str | None = None,
            config: GenerateConfig | None = None,
            seconds: float = 600.0,
        ) -> None:
            super().__init__(
                model_name, base_url, api_key, [], config or GenerateConfig()
            )
            self._client = httpx.AsyncClient(
                headers={"Authorization": f"Bearer {api_key}"}, timeout=seconds
            )

        def max_connections(self) -> int:
            return CONCURRENT_CALLS

        async def aclose(self) -> None:
            await self._client.aclose()

        async def generate(
            self,
            input: list[ChatMessage],
            tools: list[ToolInfo],
            tool_choice: ToolChoice,
            config: GenerateConfig,
        ) -> ModelOutput:
            body = {
                "messages": [openai_message(message) for message in input],
                **sampling_fields(config),
            }
            if tools and tool_choice != "none":
                body["tools"] = [
                    {"type": "function", "function": tool.model_dump(exclude_none=True)}
                    for tool in tools
                ]
                if tool_choice != "auto":
                    body["tool_choice"] = str(tool_choice)
            response = await self._client.post(
                f"{self.base_url}/chat/completions", json=body
            )
            answer = response.json()
            if response.status_code != 200:
                raise TaskFailed(answer["error"]["message"])
            choices = [
                ChatCompletionChoice(**inspect_choice(choice))
                for choice in answer["choices"]
            ]
            usage = answer["usage"]
            return ModelOutput(
                model=self.model_name,
                choices=choices,
                usage=ModelUsage(
                    input_tokens=usage["prompt_tokens"],
                    output_tokens=usage["completion_tokens"],
                    total_tokens=usage["total_tokens"],
                ),
            )


def openai_message(message: Any) -> dict[str, Any]:
    """Return a message of inspect-ai as OpenAI's API has it."""
    parts = message.content
    if not isinstance(parts, str) and any(
        part.type not in ("text", "reasoning") for part in parts
    ):
        raise TaskFailed("messages are of text here, and one has another part.")
    written: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.role == "tool":
        if message.error is not None:
            written["content"] = f"Error: {message.error.message}"
        written["tool_call_id"] = message.tool_call_id
    if message.role == "assistant" and message.tool_calls:
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function,
                    "arguments": json.dumps(call.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return written


def sampling_fields(config: Any) -> dict[str, Any]:
    """Return the options of inspect-ai's GenerateConfig that are set, as OpenAI's API names them."""
    names = {
        "max_tokens": "max_tokens",
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "stop_seqs": "stop",
        "seed": "seed",
        "num_choices": "n",
        "best_of": "best_of",
        "logprobs": "logprobs",
        "top_logprobs": "top_logprobs",
        "logit_bias": "logit_bias",
        "frequency_penalty": "frequency_penalty",
        "presence_penalty": "presence_penalty",
    }
    fields = {theirs: getattr(config, ours) for ours, theirs in names.items()}
    return {name: value for name, value in fields.items() if value is not None}


def inspect_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of inspect-ai's ChatCompletionChoice from a choice of OpenAI's API."""
    from inspect_ai.model import ChatMessageAssistant, Logprob, Logprobs
    from inspect_ai.tool import ToolCall

    calls = [
        ToolCall(
            id=call["id"],
            function=call["function"]["name"],
            arguments=json.loads(call["function"]["arguments"]),
        )
        for call in choice["message"].get("tool_calls") or ()
    ]
    reasons = {"stop": "stop", "length": "max_tokens", "tool_calls": "tool_calls"}
    fields = {
        "message": ChatMessageAssistant(
            content=choice["message"]["content"] or "",
            tool_calls=calls or None,
            source="generate",
        ),
        "stop_reason": reasons[choice["finish_reason"]],
    }
    if choice["logprobs"] is not None:
        content = [
            Logprob(token=entry["token"], logprob=entry["logprob"])
            for entry in choice["logprobs"]["content"]
        ]
        fields["logprobs"] = Logprobs(content=content)
    return fields


def inspect_result(log: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return the result of one log of inspect-ai."""
    if log.status != "success" or log.results is None:
        reason = log.error.message if log.error is not None else ""
        raise TaskFailed(
            f"inspect-ai ended with {log.status}: {reason or 'it names no reason'}"
        )
    scores = []
    # By scorer: the metric that is the mean of the samples' values.
    means: dict[str, str] = {}
    several = len(log.results.scores) > 1
    for score in log.results.scores:
        label = score.name if score.reducer in (None, "mean") else score.reducer
        prefix = f"{label}/" if several or label != score.name else ""
        stderr = score.metrics.get("stderr")
        for name, metric in score.metrics.items():
            if name == "stderr":
                continue
            is_mean = name in ("accuracy", "mean")
            scores.append(
                {
                    "metric": f"{prefix}{name}",
                    "value": number(metric.value),
                    "stderr": stderr.value if stderr and is_mean else None,
                }
            )
            if is_mean and score.reducer in (None, "mean"):
                means[score.scorer] = f"{prefix}{name}"
    return {
        "name": log.eval.task.rpartition("/")[2],
        "harness": package_version(request["harness"]),
        "version": log.eval.task_version,
        "num_samples": log.results.completed_samples,
        "scores": scores,
        "samples": inspect_samples(log, means),
    }


def inspect_samples(log: Any, means: dict[str, str]) -> list[dict[str, Any]]:
    """Return each sample's value of each scorer, averaged over epochs.

    Args:
        means: scorer -> name of the metric that is the mean of its values.
    """
    from inspect_ai.scorer import value_to_float

    as_number = value_to_float()
    samples: dict[str, dict[str, Any]] = {}
    values: dict[str, dict[str, list[float]]] = {}
    for sample in log.samples or ():
        text = sample.input
        if not isinstance(text, str):
            text = "\n".join(message.text for message in text)
        target = sample.target
        samples.setdefault(
            str(sample.id),
            {
                "input": shorten(text),
                "target": shorten(
                    target if isinstance(target, str) else "\n".join(target)
                ),
                "output": shorten(sample.output.completion),
            },
        )
        for scorer, score in (sample.scores or {}).items():
            if scorer in means and isinstance(score.value, str | int | float | bool):
                of_sample = values.setdefault(str(sample.id), {})
                of_sample.setdefault(means[scorer], []).append(as_number(score.value))
    return [
        {
            "id": name,
            "values": {
                metric: sum(numbers) / len(numbers)
                for metric, numbers in values.get(name, {}).items()
            },
            **texts,
        }
        for name, texts in samples.items()
    ]


def run_lm_eval(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Evaluate a task or a group of tasks with lm-eval, and return the results of each."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    options = dict(request["options"])
    manager = TaskManager(include_path=options.pop("include_path", None))
    if not manager.match_tasks([request["task"]]):
        raise TaskFailed(
            f"lm-eval knows no task {request['task']!r}. evaluation.harness_options.lm-eval.include_path names a "
            "folder with task files of your own."
        )
    is_chat = bool(options.get("apply_chat_template"))
    path = "chat/completions" if is_chat else "completions"
    settings: dict[str, Any] = {
        "model": request["model"],
        "base_url": f"{request['base_url']}/v1/{path}",
        "auth_token": request["token"],
        "num_concurrent": CONCURRENT_CALLS,
        # The server is on this machine: a refused call would be refused again.
        "max_retries": 1,
        "timeout": int(request["minutes"] * 60) + 1,
        "max_length": request["most_tokens"],
        # The tokenizer of the engine.
        **({} if is_chat else {"tokenizer_backend": "remote"}),
        **options.pop("model_args", {}),
    }
    evaluated = simple_evaluate(
        model="local-chat-completions" if is_chat else "local-completions",
        model_args=settings,
        tasks=[request["task"]],
        task_manager=manager,
        limit=request["limit"],
        log_samples=True,
        **options,
    )
    if evaluated is None:
        raise TaskFailed("lm-eval returned no results.")
    results = []
    for name, metrics in evaluated["results"].items():
        rows = evaluated.get("samples", {}).get(name, [])
        scores = lm_eval_scores(metrics)
        if not scores:
            # A group without a metric of its own.
            continue
        counts = evaluated.get("n-samples", {}).get(name, {})
        results.append(
            {
                "name": name,
                "harness": package_version(request["harness"]),
                "version": evaluated.get("versions", {}).get(name, ""),
                "num_samples": counts.get("effective", len(rows)),
                "scores": scores,
                "samples": lm_eval_samples(rows, scores),
            }
        )
    return results


def lm_eval_scores(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the scores of one task. lm-eval names them METRIC,FILTER and METRIC_stderr,FILTER."""
    scores = []
    for key, value in metrics.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        stderr = metrics.get(f"{metric}_stderr,{filter_name}")
        shown = metric if filter_name == "none" else f"{metric}/{filter_name}"
        has_stderr = isinstance(stderr, int | float)
        scores.append(
            {
                "metric": shown,
                "value": number(value),
                "stderr": stderr if has_stderr else None,
                "filter": filter_name,
                "key": metric,
            }
        )
    return scores


def lm_eval_samples(
    rows: Iterable[dict[str, Any]], scores: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return each document's value of each metric. The filters of a task are rows of their own."""
    samples: dict[Any, dict[str, Any]] = {}
    for row in rows:
        sample = samples.setdefault(
            row["doc_id"],
            {
                "id": str(row.get("doc_hash") or row["doc_id"]),
                "values": {},
                "input": shorten(json.dumps(row.get("doc"), default=str)),
                "target": shorten(str(row.get("target"))),
                "output": shorten(json.dumps(row.get("filtered_resps"), default=str)),
            },
        )
        for score in scores:
            value = row.get(score["key"])
            if row.get("filter", "none") == score["filter"] and isinstance(
                value, int | float
            ):
                sample["values"][score["metric"]] = float(value)
    # Documents may occur twice.
    seen: Counter[str] = Counter()
    for sample in samples.values():
        seen[sample["id"]] += 1
        if seen[sample["id"]] > 1:
            sample["id"] += f"#{seen[sample['id']]}"
    return list(samples.values())


def number(value: Any) -> float:
    """Return a metric's value, NaN for what is no number."""
    return float(value) if isinstance(value, int | float) else math.nan


def shorten(text: str) -> str:
    """Return the beginning of a text."""
    return text[:LONGEST_TEXT]


def package_version(harness: str) -> str:
    """Return the name and the version of a harness's package."""
    package = PACKAGES[harness]
    return f"{package} {importlib.metadata.version(package)}"


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Evaluate, and return the results or the error."""
    harness = request["harness"]
    try:
        __import__(MODULES[harness])
    except ImportError as error:
        return {
            "error": f"{sys.executable} cannot import {MODULES[harness]} ({error}). Install it with: "
            f"pip install 'megaverl[{harness}]', or name another interpreter in evaluation.harness_python."
        }
    runners = {"inspect": run_inspect, "lm-eval": run_lm_eval}
    try:
        return {"results": runners[harness](request)}
    except TaskFailed as error:
        return {"error": str(error)}
    except BaseException as error:
        # The task is the user's code, which may also call exit().
        traceback.print_exc()
        return {"error": f"the task raised {type(error).__name__}: {error}."}


def main() -> None:
    request = json.load(sys.stdin)
    # A task that reads its standard input gets none.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    answer = run(request)
    file = Path(request["results"])
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(answer, default=str), encoding="utf-8", errors="replace")
    part.replace(file)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the task must not keep the process alive.
    os._exit(1 if "error" in answer else 0)


if __name__ == "__main__":
    main()
