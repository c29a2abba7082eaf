"""The experts that vLLM took for each token.

Where CUDA is, vLLM's second model runner returns them itself (0.32: `distributed/aux_output_connector`), for cached
prefixes too. Its runner for CPUs does not: there the routers are asked, step by step, and no prefix is cached, as
nothing would be known of it.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megaverl.errors import RolloutError
from megaverl.platform import platform

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput


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
