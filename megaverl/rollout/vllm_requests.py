"""Requests to vLLM and their answers, with images and with the experts that each token took.

On CUDA, vLLM's second model runner returns experts itself (0.32:
`distributed/aux_output_connector`), also for cached prefixes. The CPU runner does not.
There, hooks record the routers step by step, and prefixes are not cached, since no
experts would be known for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megaverl.errors import RolloutError
from megaverl.outside import read_json_file
from megaverl.platform import platform
from megaverl.rollout.cpu_limits import speculation_here
from megaverl.rollout.engine import Generation, OnFinished, PromptScore, SavedWork
from megaverl.rollout.vllm_images import image_input
from megaverl.rollout.vllm_weights import (
    drafts_from_their_folder,
    heads_keep_their_weights,
)
from megaverl.sharding.draft_head import MTP, NUM_MTP_LAYERS, head_method

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

    from megaverl.rollout.engine import Images


def vllm_cpu() -> ModuleType:
    """Import `megaverl.platform.vllm_cpu`, which must not be imported on CUDA."""
    import megaverl.platform.vllm_cpu as adapted

    return adapted


def answers(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    parameters: Sequence[SamplingParams],
    images: Images | None,
) -> list[RequestOutput]:
    """Send all prompts to vLLM and return its outputs, one per prompt.

    Args:
        prompts: token ids; an image has one placeholder token for each of its patches.
        images: images of each prompt.

    Raises:
        RolloutError: names a prompt whose placeholder tokens do not match its images, or that vLLM returned with other
            tokens.
    """
    if images is None:
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        # Text prompts take vLLM's own path, which adds all requests at once.
        text_outputs: list[RequestOutput] = llm.generate(
            requests, list(parameters), use_tqdm=False
        )
        return text_outputs
    engine: Any = llm.llm_engine
    processor = engine.renderer.get_mm_processor()
    token = int(processor.info.get_hf_config().image_token_id)
    for number, (prompt, prompt_images, sampling) in enumerate(
        zip(prompts, images, parameters, strict=True)
    ):
        engine.add_request(
            str(next(llm.request_counter)),
            image_input(token, prompt, prompt_images, number),
            sampling,
        )
    outputs: list[RequestOutput] = llm.wait_for_completion(use_tqdm=False)
    # vLLM could have expanded a placeholder differently, and would answer another
    # prompt.
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if list(output.prompt_token_ids or ()) != list(prompt):
            raise RolloutError(
                f"prompt {number}: the engine read {len(output.prompt_token_ids or ())} tokens, and {len(prompt)} were "
                "given: it would answer another prompt than the one that is trained on."
            )
    return outputs


@contextmanager
def calling_when_finished(
    llm: LLM, on_finished: OnFinished | None, experts_of: ExpertsOf | None = None
) -> Iterator[None]:
    """Call `on_finished` for a response in the very step of vLLM's loop that finishes it."""
    if on_finished is None:
        yield
        return
    engine: Any = llm.llm_engine
    # vLLM numbers requests consecutively over all calls.
    first, step = llm.request_counter.counter, engine.step

    def step_and_call() -> Any:
        outputs = step()
        for output in outputs:
            if output.finished:
                on_finished(
                    int(output.request_id) - first, generation(output, experts_of)
                )
        return outputs

    # The instance's attribute hides the method, and deleting it shows the method again.
    engine.step = step_and_call
    try:
        yield
    finally:
        del engine.step


def speculation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rollout.vllm.speculative_config` as vLLM takes it.

    A draft model or head reads its weights from its folder, not from a reshard. The
    drafts of a prompt must not depend on earlier responses.
    """
    method, more = (
        config.get("method") or ("draft_model" if config.get("model") else ""),
        {},
    )
    if method == "suffix":
        # A cache of earlier responses would make drafts, and so rounding, depend on
        # them.
        more = {"suffix_decoding_max_cached_requests": 0}
    elif not method.startswith("ngram"):
        from vllm.config import LoadConfig

        drafts_from_their_folder()
        heads_keep_their_weights()
        more = {"draft_load_config": LoadConfig()}
    if platform.is_cuda:
        return {**config, **more}
    return speculation_here({**config, "method": method, **more})


def overrides_for_head(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of the model's config.json from which vLLM builds an MTP head in a folder of its own.

    vLLM reads their number from the main model's configuration (0.32: `MiMoMTP`), whose
    own folder has none.
    """
    folder = config.get("model")
    if config.get("method") != MTP or not (Path(str(folder)) / "config.json").is_file():
        return {}
    described = read_json_file(Path(str(folder)) / "config.json")
    return {NUM_MTP_LAYERS: 1} if head_method(described) == MTP else {}


def count_drafts(scheduler: Any, work: Callable[[], SavedWork]) -> None:
    """Count drafts from now on by wrapping vLLM's scheduler, whose own statistics are turned off."""
    make = scheduler.make_spec_decoding_stats

    def make_and_count(
        *args: Any, num_draft_tokens: int, num_accepted_tokens: int, **rest: Any
    ) -> Any:
        work().draft_tokens += num_draft_tokens
        work().accepted_tokens += num_accepted_tokens
        return make(
            *args,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            **rest,
        )

    scheduler.make_spec_decoding_stats = make_and_count


def generation(
    output: RequestOutput, experts_of: ExpertsOf | None = None
) -> Generation:
    """Convert a vLLM output to a Generation, with the experts that it took if `experts_of` is given."""
    [response] = output.outputs
    # With logprobs=0 a position holds the drawn token alone, so the flat lists run
    # along the response.
    log_probs = response.logprobs.logprobs if response.logprobs is not None else []
    experts = None if experts_of is None else experts_of(output)
    return Generation(
        list(response.token_ids), list(log_probs), str(response.finish_reason), experts
    )


def prompt_score(output: RequestOutput) -> PromptScore:
    """Convert a vLLM output with `prompt_logprobs=1` and one greedy token to a PromptScore."""
    prompt = output.prompt_token_ids or []
    [response] = output.outputs
    # The first token has no predecessor, and so no log-prob.
    by_token = list(output.prompt_logprobs or [])[1:]
    if len(by_token) != len(prompt) - 1 or not response.logprobs:
        raise RolloutError(
            f"vLLM returned log-probs of {len(by_token)} tokens for a prompt of {len(prompt)}."
        )
    log_probs, top_tokens, top_log_probs = [], [], []
    for token, candidates in zip(prompt[1:], by_token, strict=True):
        assert candidates is not None, "only the first token has none"
        # The most likely token, and the prompt's own one.
        top = max(candidates, key=lambda number: candidates[number].logprob)
        log_probs.append(float(candidates[token].logprob))
        top_tokens.append(int(top))
        top_log_probs.append(float(candidates[top].logprob))
    [next_token] = response.token_ids
    top_tokens.append(int(next_token))
    top_log_probs.append(float(response.logprobs[0][next_token].logprob))
    return PromptScore(log_probs, top_tokens, top_log_probs)


class ExpertsOf(Protocol):
    """Source of the experts that a finished request took."""

    def __call__(self, output: RequestOutput) -> torch.Tensor:
        """Return experts [prompt + response - 1, layers, k] as uint8 or int16."""

    def forget(self) -> None:
        """Discard the records of all requests so far."""


def expert_arguments() -> dict[str, Any]:
    """Return the EngineArgs of an engine that reports routed experts."""
    if not platform.is_cuda:
        # The experts of cached prefixes would be unknown.
        return {"enable_prefix_caching": False}
    from vllm.distributed.aux_output_connector import worker

    # vLLM keeps experts on the first tensor-parallel rank. Here every rank has a
    # scheduler that asks for them.
    worker.get_tp_group = lambda: SimpleNamespace(is_first_rank=True)
    return {"enable_return_routed_experts": True}


def experts_of_requests(llm: LLM) -> ExpertsOf:
    """Return the source of routed experts for this engine.

    Raises:
        RolloutError: the model has no routed experts.
    """
    return ReturnedExperts() if platform.is_cuda else StepRecorder(llm)


class ReturnedExperts:
    """Experts that vLLM returns with its outputs (CUDA)."""

    def __call__(self, output: RequestOutput) -> torch.Tensor:
        experts = output.outputs[0].routed_experts
        if experts is None:
            raise RolloutError(
                "vLLM returned no routed experts, though enable_return_routed_experts is set."
            )
        return torch.from_numpy(
            experts if experts.dtype.itemsize == 1 else experts.astype("int16")
        )

    def forget(self) -> None:
        """Do nothing: outputs are not kept."""


class StepRecorder:
    """Records the experts that routers choose for every running request (CPU)."""

    def __init__(self, llm: LLM) -> None:
        engine: Any = llm.llm_engine
        self._runner: Any = engine.model_executor.driver_worker.worker.model_runner
        config = engine.vllm_config.model_config
        self._shape = (
            config.get_total_num_hidden_layers(),
            config.get_num_experts_per_tok(),
        )
        # The smallest integer type that holds all experts.
        self._dtype = torch.uint8 if config.get_num_experts() <= 256 else torch.int16
        self._step: dict[int, torch.Tensor] = {}  # layer -> [tokens of the step, k]
        # request -> first token -> [tokens, layers, k].
        self._taken: dict[str, dict[int, torch.Tensor]] = {}
        layers = [
            module
            for module in self._runner.get_model().modules()
            if hasattr(module, "routed_experts")
        ]
        if not layers:
            raise RolloutError(
                "actor.router_replay: vLLM's model has no routed experts. Leave it out."
            )
        for layer in layers:
            # vLLM calls this function with each layer's choice.
            layer.router.set_capture_fn(partial(self._capture, layer.layer_id))
        run = self._runner.execute_model

        def run_and_record(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            # Layers without tokens in a step leave no entry.
            self._step.clear()
            output = run(scheduled, *args, **kwargs)
            self._record(scheduled.num_scheduled_tokens)
            return output

        self._runner.execute_model = run_and_record

    def _capture(self, layer: int, experts: torch.Tensor) -> None:
        self._step[layer] = experts.to(self._dtype)

    def _record(self, scheduled: dict[str, int]) -> None:
        """Assign the step's tokens to their requests. vLLM lays them out request after request."""
        if not self._step:
            return
        first_layer = next(iter(self._step.values()))
        # [tokens of the step, layers, k]; layers without experts stay zero.
        tokens = first_layer.new_zeros(len(first_layer), *self._shape)
        for layer, experts in self._step.items():
            tokens[:, layer] = experts
        batch, place = self._runner.input_batch, 0
        for row, request in enumerate(batch.req_ids):
            count = scheduled[request]
            # Number of the request's first token in this step.
            first = int(batch.num_computed_tokens_cpu[row])
            # vLLM adds random characters to the name.
            name = request.rpartition("-")[0] or request
            self._taken.setdefault(name, {})[first] = tokens[place : place + count]
            place += count

    def __call__(self, output: RequestOutput) -> torch.Tensor:
        total = (
            len(output.prompt_token_ids or ()) + len(output.outputs[0].token_ids) - 1
        )
        recorded = torch.empty(total, *self._shape, dtype=self._dtype)
        known = torch.zeros(total, dtype=torch.bool)
        # A preempted request is computed again, and later records replace earlier ones.
        for first, tokens in self._taken[output.request_id].items():
            recorded[first : first + len(tokens)] = tokens[: total - first]
            known[first : first + len(tokens)] = True
        if not bool(known.all()):
            raise RolloutError(
                f"request {output.request_id}: the experts of {int((~known).sum())} tokens are unknown."
            )
        return recorded

    def forget(self) -> None:
        """Discard all records, as every request has been answered."""
        self._taken.clear()
