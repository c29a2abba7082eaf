"""Requests to vLLM, and its answers as they come, with the experts that it took for each token.

Images come already processed, so that engine and trainer see the same numbers, and each is processed once.

Where CUDA is, vLLM's second model runner returns experts itself (0.32: `distributed/aux_output_connector`), for cached
prefixes too. Its runner for CPUs does not: there the routers are asked, step by step, and no prefix is cached, as
nothing would be known of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megaverl.errors import RolloutError
from megaverl.platform import platform
from megaverl.rollout.cpu_limits import check_images_run_here, speculation_here
from megaverl.rollout.engine import Generation, OnFinished, SavedWork
from megaverl.rollout.vllm_tracing import pixels_are_normalised
from megaverl.rollout.vllm_weights import drafts_from_their_folder

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

    from megaverl.config.run import ImagesConfig
    from megaverl.distributed.shared_item import SharedItem
    from megaverl.rollout.engine import Images


def vllm_cpu() -> ModuleType:
    """`megaverl.platform.vllm_cpu`, which is not imported where CUDA is."""
    import megaverl.platform.vllm_cpu as adapted

    return adapted


def prepare_images(architecture: str) -> dict[str, Any]:
    """Further EngineArgs of a model that takes images, as this vLLM knows them; to be called before its engine is made.

    Raises:
        RolloutError: this machine's vLLM computes its images otherwise.
    """
    found = pixels_are_normalised()
    if not platform.is_cuda:
        check_images_run_here(architecture)
        found["skip_mm_profiling"] = True  # nothing is measured on a CPU
    return found


def image_arguments(config: ImagesConfig, tokenizer: str) -> dict[str, Any]:
    """EngineArgs of a model that takes images.

    Args:
        tokenizer: the one that the run has; vLLM refuses such models without any.
    """
    return {
        "skip_tokenizer_init": False,
        "tokenizer": tokenizer,
        "limit_mm_per_prompt": {"image": config.max_per_prompt, "video": 0},
        # nothing is processed here; it says how many tokens an image has at most
        "mm_processor_kwargs": dict(config.processor),
        "mm_processor_cache_gb": 0,
    }


def answers(
    llm: LLM, prompts: Sequence[Sequence[int]], parameters: Sequence[SamplingParams], images: Images | None
) -> list[RequestOutput]:
    """vLLM's outputs, one per prompt.

    Args:
        prompts: token ids; of an image one for each of its parts.
        images: of each prompt.

    Raises:
        RolloutError: a prompt whose tokens have other places for images than it has images, or that comes back as
            other tokens; named by its number.
    """
    if images is None:
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return llm.generate(requests, list(parameters), use_tqdm=False)  # type: ignore[arg-type]
    engine: Any = llm.llm_engine
    processor = engine.renderer.get_mm_processor()
    for number, (prompt, own, way) in enumerate(zip(prompts, images, parameters, strict=True)):
        engine.add_request(str(next(llm.request_counter)), _input(processor, prompt, own, number), way)
    outputs: list[RequestOutput] = llm.wait_for_completion(use_tqdm=False)  # type: ignore[assignment]
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if list(output.prompt_token_ids or ()) != list(prompt):
            raise RolloutError(
                f"prompt {number}: the engine read {len(output.prompt_token_ids or ())} tokens, and {len(prompt)} were "
                "given: it would answer another prompt than the one that is trained on."
            )
    return outputs


def _input(processor: Any, prompt: Sequence[int], images: Sequence[SharedItem], number: int) -> Any:
    """What vLLM's own processor makes of a prompt, from what ours has made of it."""
    from transformers import BatchFeature
    from vllm.inputs.engine import mm_input, tokens_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    if not images:
        return tokens_input(list(prompt))
    token = int(processor.info.get_hf_config().image_token_id)
    places = list(image_places(prompt, token, [image.size for image in images]))
    if len(places) != len(images) or prompt.count(token) != sum(length for _, length in places):
        raise RolloutError(f"prompt {number}: its tokens have {len(places)} places for its {len(images)} images.")
    made = BatchFeature(
        {
            "pixel_values": torch.cat([image.tensors["pixel_values"] for image in images]),
            "image_grid_thw": torch.stack([image.tensors["image_grid_thw"] for image in images]),
        }
    )
    return mm_input(
        list(prompt),
        MultiModalKwargsItems.from_hf_inputs(made, processor._get_mm_fields_config(made, {})),
        {"image": [image.key for image in images]},
        {"image": [PlaceholderRange(offset=offset, length=length) for offset, length in places]},
    )


def image_places(prompt: Sequence[int], token: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first token, number of tokens) of each image in the prompt; stops where a run of the image token does not come
    out even."""
    waiting, place = list(sizes), 0
    for is_image, run in groupby(prompt, lambda one: one == token):
        length = len(list(run))
        while is_image and waiting and waiting[0] <= length:  # neighbours without a token between them
            yield place, waiting[0]
            place, length = place + waiting[0], length - waiting.pop(0)
        if is_image and length:
            return
        place += length


@contextmanager
def calling_when_finished(
    llm: LLM, on_finished: OnFinished | None, experts_of: ExpertsOf | None = None
) -> Iterator[None]:
    """Inside, hear of responses in the very step of vLLM's loop that finishes them."""
    if on_finished is None:
        yield
        return
    engine: Any = llm.llm_engine
    # requests are numbered one after the other, over all calls
    first, step = llm.request_counter.counter, engine.step

    def step_and_call() -> Any:
        outputs = step()
        for output in outputs:
            if output.finished:
                on_finished(int(output.request_id) - first, generation(output, experts_of))
        return outputs

    engine.step = step_and_call
    try:
        yield
    finally:
        del engine.step


def speculation(given: Mapping[str, Any]) -> dict[str, Any]:
    """`rollout.vllm.speculative_config` as vLLM takes it: a draft's weights come from its folder and no reshard, and
    what is drawn for a prompt does not depend on responses before it."""
    method, more = given.get("method") or ("draft_model" if given.get("model") else ""), {}
    if method == "suffix":
        more = {"suffix_decoding_max_cached_requests": 0}
    elif not method.startswith("ngram"):
        from vllm.config import LoadConfig

        drafts_from_their_folder()
        more = {"draft_load_config": LoadConfig()}
    if platform.is_cuda:
        return {**given, **more}
    return speculation_here({**given, "method": method, **more})


def count_drafts(scheduler: Any, work: Callable[[], SavedWork]) -> None:
    """From now on add what vLLM's scheduler sees of drafts; its own statistics are off."""
    make = scheduler.make_spec_decoding_stats

    def make_and_count(*args: Any, num_draft_tokens: int, num_accepted_tokens: int, **rest: Any) -> Any:
        work().draft_tokens += num_draft_tokens
        work().accepted_tokens += num_accepted_tokens
        return make(*args, num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens, **rest)

    scheduler.make_spec_decoding_stats = make_and_count


def generation(output: RequestOutput, experts_of: ExpertsOf | None = None) -> Generation:
    """One response, as every engine gives it; with the experts that it took where something knows them."""
    [response] = output.outputs
    # With logprobs=0 a position holds the drawn token alone, so the flat lists run along the response.
    log_probs = response.logprobs.logprobs if response.logprobs is not None else []
    experts = None if experts_of is None else experts_of(output)
    return Generation(list(response.token_ids), list(log_probs), str(response.finish_reason), experts)


class ExpertsOf(Protocol):
    """What knows which experts a finished request took."""

    def __call__(self, output: RequestOutput) -> torch.Tensor:
        """[prompt + response - 1, layers, k] uint8 or int16."""

    def forget(self) -> None:
        """Of the requests so far nothing more is asked."""


def expert_arguments() -> dict[str, Any]:
    """EngineArgs of an engine that says which experts it takes."""
    if not platform.is_cuda:
        return {"enable_prefix_caching": False}
    from vllm.distributed.aux_output_connector import worker

    # it keeps them on the first tensor-parallel rank; here each rank's own scheduler asks for them
    worker.get_tp_group = lambda: SimpleNamespace(is_first_rank=True)
    return {"enable_return_routed_experts": True}


def experts_of_requests(llm: LLM) -> ExpertsOf:
    """What this engine's requests can be asked with.

    Raises:
        RolloutError: a model without routed experts.
    """
    return ReturnedExperts() if platform.is_cuda else StepRecorder(llm)


class ReturnedExperts:
    """Those that come with vLLM's answers."""

    def __call__(self, output: RequestOutput) -> torch.Tensor:
        experts = output.outputs[0].routed_experts
        if experts is None:
            raise RolloutError("vLLM returned no routed experts, though enable_return_routed_experts is set.")
        return torch.from_numpy(experts if experts.dtype.itemsize == 1 else experts.astype("int16"))

    def forget(self) -> None:
        """Nothing is kept."""


class StepRecorder:
    """Keeps what the routers of a model on a CPU chose, of every request that runs."""

    def __init__(self, llm: LLM) -> None:
        engine: Any = llm.llm_engine
        self._runner: Any = engine.model_executor.driver_worker.worker.model_runner
        config = engine.vllm_config.model_config
        self._shape = (config.get_total_num_hidden_layers(), config.get_num_experts_per_tok())
        self._dtype = torch.uint8 if config.get_num_experts() <= 256 else torch.int16
        self._step: dict[int, torch.Tensor] = {}  # layer -> [tokens of the step, k]
        self._taken: dict[str, dict[int, torch.Tensor]] = {}  # request -> first token -> [tokens, layers, k]
        layers = [module for module in self._runner.get_model().modules() if hasattr(module, "routed_experts")]
        if not layers:
            raise RolloutError("actor.router_replay: vLLM's model has no routed experts. Leave it out.")
        for layer in layers:
            layer.router.set_capture_fn(partial(self._capture, layer.layer_id))
        run = self._runner.execute_model

        def run_and_record(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self._step.clear()
            output = run(scheduled, *args, **kwargs)
            self._record(scheduled.num_scheduled_tokens)
            return output

        self._runner.execute_model = run_and_record

    def _capture(self, layer: int, experts: torch.Tensor) -> None:
        self._step[layer] = experts.to(self._dtype)

    def _record(self, scheduled: dict[str, int]) -> None:
        """A step's tokens lie request after request."""
        if not self._step:
            return
        first_layer = next(iter(self._step.values()))
        tokens = first_layer.new_zeros(len(first_layer), *self._shape)
        for layer, experts in self._step.items():
            tokens[:, layer] = experts
        batch, place = self._runner.input_batch, 0
        for row, request in enumerate(batch.req_ids):
            count = scheduled[request]
            first = int(batch.num_computed_tokens_cpu[row])
            name = request.rpartition("-")[0] or request  # vLLM adds random characters to the name
            self._taken.setdefault(name, {})[first] = tokens[place : place + count]
            place += count

    def __call__(self, output: RequestOutput) -> torch.Tensor:
        total = len(output.prompt_token_ids or ()) + len(output.outputs[0].token_ids) - 1
        found = torch.empty(total, *self._shape, dtype=self._dtype)
        known = torch.zeros(total, dtype=torch.bool)
        for first, tokens in self._taken[output.request_id].items():
            found[first : first + len(tokens)] = tokens[: total - first]
            known[first : first + len(tokens)] = True
        if not bool(known.all()):
            raise RolloutError(f"request {output.request_id}: the experts of {int((~known).sum())} tokens are unknown.")
        return found

    def forget(self) -> None:
        """All are answered."""
        self._taken.clear()
