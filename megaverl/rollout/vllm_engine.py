"""vLLM inside the training processes: `external_launcher`, one engine per `rollout.tp` neighbouring ranks.

The module contains the engine itself. `vllm_layouts` derives where weights go,
`vllm_weights` guards what a reshard writes, `vllm_requests` sends requests,
`vllm_images` adds images to them, and `vllm_tracing` protects the training process from changes that vLLM makes.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megaverl.announcements import announcements
from megaverl.errors import RolloutError
from megaverl.platform import platform
from megaverl.platform.batch_invariant import batch_invariant
from megaverl.processes import freeze_objects, thaw_objects
from megaverl.rollout.cpu_kernels import why_no_kernel
from megaverl.rollout.cpu_limits import (
    LATENT_ATTENTION,
    check_delta_net_runs_here,
    check_runs_here,
)
from megaverl.rollout.engine import (
    Generation,
    Images,
    InFlight,
    OnFinished,
    OnLoad,
    Prompts,
    PromptScore,
    Sampling,
    SamplingOptions,
    SavedWork,
    Shapes,
    check_generations,
    check_request,
    options_by_prompt,
)
from megaverl.rollout.vllm_cache import cache_limited
from megaverl.rollout.vllm_drafts import EngineDraft, without_shared
from megaverl.rollout.vllm_images import prepare_images
from megaverl.rollout.vllm_layouts import LoaderLayouts
from megaverl.rollout.vllm_options import VLLMOptions
from megaverl.rollout.vllm_packed import loading_parameters_kept
from megaverl.rollout.vllm_requests import (
    answers,
    calling_when_finished,
    count_drafts,
    expert_arguments,
    experts_of_requests,
    generation,
    overrides_for_head,
    prompt_score,
    speculation,
    vllm_cpu,
)
from megaverl.rollout.vllm_tracing import (
    current_config,
    frozen_objects_kept,
    inspect_here,
    keep_default_group,
    process_state_kept,
    random_state_kept,
    release_groups,
    unlink_queue_buffers,
)
from megaverl.rollout.vllm_weights import (
    CACHE,
    WEIGHTS,
    contents_dropped,
    in_floating_point,
    loaded_parameters,
    loaded_tensors,
    model_loaded,
    order_kept,
    quantised_arguments,
    quantised_weights,
    remake_derived,
)
from megaverl.sharding.model_config import WITH_CHUNKS
from megaverl.sharding.model_spec import (
    ModelSpec,
    misfits,
    why_not_batch_invariant,
)

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

    from megaverl.config.roles import RolloutConfig
    from megaverl.sharding.layout import Layout
    from megaverl.sharding.vllm import EngineWeight

logger = logging.getLogger(__name__)

ENVIRONMENT = {
    # Keep the engine core in this process, so that a reshard can write its parameters.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # With AMX, the CPU build would round activations of int4 engines to 8 bits.
    "VLLM_CPU_INT4_W4A8": "0",
    # MXFP8 without a kernel: keep 8-bit weights, as the planner counts them.
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD": "0",
    # vLLM would warn about a missing tokenizer, compiler and sampling defaults, which
    # are left out on purpose.
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
}
# Selects vLLM's batch-invariant mode, which needs a GPU of compute capability 9.0 or higher (0.32).
BATCH_INVARIANT_VARIABLE = "VLLM_BATCH_INVARIANT"


class VLLMEngine:
    """This rank's part of a vLLM engine; see `megaverl.rollout.engine.Engine` for the methods.

    Every rank of the default process group makes its part at the same time. Ranks r*tp
    to r*tp + tp - 1 are replica r. Each rank runs its own scheduler on the same
    requests, and all of them generate the same responses.

    Args:
        model_folder: a Hugging Face folder; vLLM reads its config.json, and its weights if `load_weights`.
        config: `rollout`: `tp`, `sleep`, and `vllm`, which are EngineArgs under their own names.
        options: what the run and its model ask for.
        on_load: see `megaverl.rollout.make_engine`.

    Raises:
        RolloutError: there is no process group; `rollout.tp` does not divide the number of ranks; this engine or
            machine cannot run the model; a quantisation or kernel would keep weights in another order than a reshard
            writes; or vLLM refuses the EngineArgs.
    """

    def __init__(
        self,
        model_folder: str | Path,
        config: RolloutConfig,
        options: VLLMOptions,
        *,
        on_load: OnLoad | None = None,
    ) -> None:
        dtype, load_weights, images = (
            options.dtype,
            options.load_weights,
            options.images,
        )
        self.tp_size = config.tp
        self.replica, self.tp_rank, self.num_replicas = _place(config.tp)
        self.max_model_len = options.max_model_len
        self._stop_token_ids = options.stop_token_ids
        self._can_sleep = config.sleep and platform.is_cuda
        self._asleep: set[str] = set()  # memory that is unmapped: WEIGHTS, CACHE
        self._has_weights = load_weights
        self._dtype = dtype
        spec = ModelSpec.outline(model_folder)
        self._vocab_size = spec.vocab_size
        self._draft: EngineDraft | None = None
        # Checked before vLLM is imported, which takes seconds.
        _check_model(spec, config.tp, options.max_model_len)
        if config.batch_invariant:
            _prepare_batch_invariant(spec)
        prepare_vllm()
        keep_default_group()
        # An engine's start runs five garbage collections, which need not visit existing
        # objects.
        freeze_objects()
        self._takes_images = images is not None
        of_images = (
            {} if images is None else {**images, **prepare_images(spec.architecture)}
        )
        inspect_here(spec.architecture)
        arguments = engine_arguments(config, spec, replace(options, images=of_images))
        drafts = arguments.get("speculative_config")
        self.saved_work = SavedWork()
        self.in_flight: InFlight | None = None
        self.on_finished: OnFinished | None = None
        self.may_rebind = not platform.is_cuda or bool(arguments.get("enforce_eager"))
        # The CPU build would pack weights as they are loaded, which a reshard could not
        # reach.
        to_come = (
            nullcontext()
            if load_weights or platform.is_cuda
            else vllm_cpu().weights_to_come()
        )

        def loaded(model: torch.nn.Module) -> None:
            unlink_queue_buffers()
            self._config = current_config()
            self._layouts = LoaderLayouts(
                model, self._config, dtype, empty=not load_weights
            )
            if on_load is not None:
                # An actor's storage can replace the parameters only now, before
                # anything is captured.
                on_load(self._written(model), self.layouts)
                # Derived weights may be views of storage that on_load has replaced.
                remake_derived(model, dtype, may_move=True)

        def announce(text: str) -> None:
            if self.replica == self.tp_rank == 0:
                announcements.info("%s", text)

        limit = cache_limited(options.num_sequences, arguments, announce)
        self._numerics = partial(batch_invariant, config.batch_invariant)
        # All contexts apply to the engine's construction alone.
        with (
            self._numerics(),
            to_come,
            nullcontext() if load_weights else order_kept(),
            loading_parameters_kept(),
            model_loaded(loaded),
            limit,
        ):
            self._llm: LLM | None = _start(str(model_folder), arguments)
        self._experts_of = (
            experts_of_requests(self._llm) if options.routed_experts else None
        )
        # vLLM counts drafts only for its own statistics, which are off.
        if drafts:
            count_drafts(self._scheduler, lambda: self.saved_work)

    @property
    def llm(self) -> LLM:
        """vLLM's `LLM` object.

        Raises:
            RolloutError: the engine is asleep or closed.
        """
        if CACHE in self._asleep:
            raise RolloutError(
                "the engine is asleep: call wake_up() before generating."
            )
        return self._open

    @property
    def _open(self) -> LLM:
        if self._llm is None:
            raise RolloutError("the engine is closed.")
        return self._llm

    @property
    def _scheduler(self) -> Any:
        # With VLLM_ENABLE_V1_MULTIPROCESSING=0 the core is an object of this process.
        client: Any = self._open.llm_engine.engine_core
        return client.engine_core.scheduler

    @property
    def model(self) -> torch.nn.Module:
        """vLLM's model on this rank, without the wrappers that capture graphs."""
        if WEIGHTS in self._asleep:
            raise RolloutError(
                "the engine is asleep: call wake_weights() before writing weights."
            )
        model: torch.nn.Module = self._runner.get_model()
        return model

    @property
    def _runner(self) -> Any:
        return self._open.llm_engine.model_executor.driver_worker.worker.model_runner

    @property
    def draft(self) -> EngineDraft:
        """Draft model on this rank, for a reshard that writes its weights.

        Raises:
            RolloutError: the engine has no draft model.
        """
        if self._draft is None:
            model = self._runner.get_draft_model()
            if model is None:
                raise RolloutError(
                    "the engine has no draft model. Name one: rollout.vllm.speculative_config={model: FOLDER, "
                    "num_speculative_tokens: 3}."
                )
            without_shared(model, self.model)
            self._draft = EngineDraft(
                model, self._config, self._dtype, self.reset_prefix_cache
            )
        return self._draft

    def named_parameters(self) -> dict[str, torch.Tensor]:
        return self._written(self.model)

    def quantised_weights(self) -> dict[str, EngineWeight]:
        return quantised_weights(self.model)

    def layouts(self, shapes: Shapes) -> Callable[[int], Layout]:
        return self._layouts(shapes)

    def _written(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the tensors that a reshard writes; quantised ones as tensors without data."""
        held = loaded_tensors(model) | in_floating_point(
            quantised_weights(model), self._dtype
        )
        return {
            name: held[name] for name in self._layouts.local_names()
        } | self._layouts.beside

    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        images: Images | None = None,
    ) -> list[Generation]:
        if not self._has_weights:
            raise RolloutError(
                "the engine has no weights yet: reshard before the first generate()."
            )
        check_request(
            prompts,
            sampling,
            seeds,
            max_model_len=self.max_model_len,
            vocab_size=self._vocab_size,
        )
        # Collective over the ranks of the replica.
        self._check_ranks_agree(prompts, sampling, seeds, images)
        if not prompts:
            return []
        per_prompt = options_by_prompt(sampling, len(prompts))
        if self.in_flight is not None:
            self._limit(
                self.in_flight,
                max(map(len, prompts))
                + max(options.max_tokens for options in per_prompt),
            )
        # Generation must not change the random numbers of the training process.
        with (
            random_state_kept(),
            _eager(),
            self._numerics(),
            calling_when_finished(self.llm, self.on_finished, self._experts_of),
        ):
            outputs = answers(
                self.llm, prompts, self._parameters(per_prompt, seeds), images
            )
        generations = [generation(output, self._experts_of) for output in outputs]
        self.saved_work.add_cached(
            prompts, (output.num_cached_tokens or 0 for output in outputs)
        )
        # Records of answered requests would pile up.
        if self._experts_of is not None:
            self._experts_of.forget()
        check_generations(generations, len(prompts))
        return generations

    def score_prompts(self, prompts: Prompts) -> list[PromptScore]:
        from vllm import SamplingParams

        if not self._has_weights:
            raise RolloutError(
                "the engine has no weights yet: reshard before the first score_prompts()."
            )
        options = SamplingOptions(max_tokens=1, temperature=0.0)
        check_request(
            prompts,
            options,
            [0] * len(prompts),
            max_model_len=self.max_model_len,
            vocab_size=self._vocab_size,
        )
        # Collective over the ranks of the replica.
        self._check_ranks_agree(prompts, options, "score")
        if not prompts:
            return []
        # vLLM generates a token after every prompt. At temperature 0 it is the most
        # likely one.
        parameters = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=1,
            detokenize=False,
        )
        with random_state_kept(), _eager():
            outputs = answers(self.llm, prompts, [parameters] * len(prompts), None)
        if self._experts_of is not None:
            self._experts_of.forget()
        return [prompt_score(output) for output in outputs]

    def _limit(self, in_flight: InFlight, longest: int) -> None:
        """Limit vLLM's scheduler to as many sequences as its free blocks hold in full length."""
        scheduler = self._scheduler
        # Blocks that are cached but unused count as free.
        free = (
            scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            * scheduler.block_size
        )
        slots = scheduler.scheduler_config.max_num_seqs
        # Older versions only limit the number of slots.
        limit = (
            "max_num_active_reqs"
            if hasattr(scheduler, "max_num_active_reqs")
            else "max_num_running_reqs"
        )
        # More slots than vLLM's scheduler has are of no use.
        in_flight.number = min(in_flight.choose(free, longest), slots)
        setattr(scheduler, limit, in_flight.number)

    def _parameters(
        self, per_prompt: Sequence[SamplingOptions], seeds: Sequence[int]
    ) -> list[SamplingParams]:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError

        parameters = []
        for options, seed in zip(per_prompt, seeds, strict=True):
            fields = {
                **options.extra,
                "max_tokens": options.max_tokens,
                "temperature": options.temperature,
                "top_p": options.top_p,
                "top_k": options.top_k,
                "stop_token_ids": options.stop_tokens(self._stop_token_ids),
                # Else config.json's end-of-sequence token stops a response too.
                "ignore_eos": options.ignore_eos,
                "logprobs": 0,  # only the drawn token's
                "flat_logprobs": True,
                "detokenize": False,
            }
            try:
                parameters.append(SamplingParams(seed=seed, **fields))
            except (TypeError, ValueError, VLLMValidationError) as error:
                raise RolloutError(
                    f"rollout.sampling: vLLM refuses {options}: {error}"
                ) from error
        return parameters

    def _check_ranks_agree(self, *request: Any) -> None:
        """Check that all ranks of the replica hold the same request. Otherwise their
        schedulers would diverge and deadlock.
        """
        if self.tp_size == 1:
            return
        from vllm.distributed import get_tp_group

        # Any JSON-like form will do, as long as equal requests give equal text.
        text = json.dumps(request, default=repr).encode()
        digest = int.from_bytes(
            hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True
        )
        own_digest = torch.tensor([digest])
        digests = [torch.empty_like(own_digest) for _ in range(self.tp_size)]
        # Collective over the ranks of the replica, on the host.
        dist.all_gather(digests, own_digest, group=get_tp_group().cpu_group)
        different = [
            rank
            for rank, digest in enumerate(digests)
            if int(digest) != int(digests[0])
        ]
        if different:
            first = self.replica * self.tp_size
            raise RolloutError(
                f"replica {self.replica}: ranks {[first + rank for rank in different]} were given other prompts, "
                f"sampling options or seeds than rank {first}. Give all ranks of a replica the same request."
            )

    def reset_prefix_cache(self) -> None:
        """Discard everything that was computed from old weights, or compute it again.

        These are cached prefixes, which the cache identifies by tokens alone; absorbed
        projections of latent attention; and on a CPU, packed copies of the weights.

        Raises:
            RolloutError: vLLM refuses, as it does while requests are running.
        """
        if not self._open.reset_prefix_cache():
            raise RolloutError(
                "vLLM did not reset its prefix cache: requests are still running. Responses after this would mix "
                "old and new weights. Update weights only between calls of generate()."
            )
        # After the cache, because these parameters are part of the weights.
        self._layouts.load_computed()
        # The encoder's cache identifies images by their content, so its entries are
        # from old weights.
        if self._takes_images:
            self._open.llm_engine.reset_encoder_cache()
        models = [self.model]
        # A draft model that no reshard writes keeps what it derived from its folder.
        if self._draft is not None:
            self._draft.load_computed()
            models.append(self._draft.model)
        for model in models:
            remake_derived(model, self._dtype, may_move=self.may_rebind)
            if not platform.is_cuda:
                with self._numerics():
                    vllm_cpu().repack_weights(model)
        self._has_weights = True

    def sleep(self) -> None:
        """Move weights out of device memory and drop the cache. Without effect on a CPU or without `rollout.sleep`."""
        self._sleep([])

    def sleep_without(self, names: Collection[str]) -> bool:
        if not self._can_sleep:
            return False
        if WEIGHTS not in self._asleep:
            parameters = dict(loaded_parameters(self.model))
            # The contents of these parameters will be written by a reshard, so they
            # need no copy.
            self._sleep([parameters[name] for name in names if name in parameters])
        self._has_weights = False
        return True

    def _sleep(self, written_anew: Sequence[torch.Tensor]) -> None:
        if not self._can_sleep or self._asleep:
            logger.debug("sleep: nothing to do")
            return
        if platform.is_cuda:
            # A step that was scheduled ahead may still be reading memory that is
            # unmapped here.
            torch.cuda.synchronize()
        with contents_dropped(written_anew) as dropped:
            self._open.sleep(level=1)
        logger.debug("sleep: %d bytes of weights are not kept", dropped)
        self._asleep = {WEIGHTS, CACHE}

    def wake_weights(self) -> None:
        self._wake(WEIGHTS)

    def wake_up(self) -> None:
        self._wake(WEIGHTS)
        self._wake(CACHE)

    def _wake(self, tag: str) -> None:
        # Waking twice would map the memory a second time.
        if tag in self._asleep and self._llm is not None:
            self._llm.wake_up(tags=[tag])
            self._asleep.remove(tag)

    def close(self) -> None:
        """Free weights, cache and vLLM's process groups. The default process group stays."""
        if self._llm is None:
            return
        # vLLM unfreezes all objects when an engine ends.
        with frozen_objects_kept():
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        # vLLM's groups would otherwise hinder an engine of another shape.
        release_groups()
        thaw_objects()
        gc.collect()


def prepare_vllm() -> None:
    """Set vLLM's environment and adapt it to this machine. Call before vLLM is imported."""
    # vLLM reads the environment when it is imported, and again when an engine is made.
    os.environ.update(ENVIRONMENT)
    # Numba, which looks for n-grams, shares OpenMP's threads with torch: each search
    # left one for every core. With more threads than at its start, the CPU build's
    # attention computed wrong values (0.32).
    os.environ.setdefault("NUMBA_NUM_THREADS", str(torch.get_num_threads()))
    platform.adapt_vllm()


def _prepare_batch_invariant(spec: ModelSpec) -> None:
    """Check that the mode can be used, and on CUDA select vLLM's own before vLLM is imported."""
    if not platform.is_cuda or spec.is_recurrent:
        if reason := why_not_batch_invariant(spec):
            place = "" if platform.is_cuda else "on a CPU "
            raise RolloutError(f"rollout.batch_invariant: {place}{reason}.")
        return
    # vLLM's kernels read the variable when their modules are imported.
    if "vllm" in sys.modules and os.environ.get(BATCH_INVARIANT_VARIABLE) != "1":
        raise RolloutError(
            f"rollout.batch_invariant: vLLM was imported without {BATCH_INVARIANT_VARIABLE}=1. Set it in the job's "
            "environment, or make no engine without this mode before."
        )
    os.environ[BATCH_INVARIANT_VARIABLE] = "1"


def engine_arguments(
    config: RolloutConfig, spec: ModelSpec, options: VLLMOptions
) -> dict[str, Any]:
    """Return the arguments of vLLM's `LLM`, which are EngineArgs but for the model's folder; see `VLLMEngine`.

    Raises:
        RolloutError: this engine or machine cannot run the model, or cannot train with a setting.
    """
    # The user's fields override the defaults, and fields that training needs override both.
    arguments: dict[str, Any] = {
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": config.tp,
        "dtype": options.dtype,
        "seed": options.seed,
        "max_model_len": options.max_model_len,
        "trust_remote_code": options.trust_remote_code,
        "load_format": "auto" if options.load_weights else "dummy",
        "skip_tokenizer_init": True,
        # Stop tokens and sampling come from the run's configuration, not from the model
        # folder.
        "generation_config": "vllm",
        # Report log-probs after temperature, top-k and top-p: those of the distribution
        # that was drawn from.
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "use_tqdm_on_load": False,
        "enable_sleep_mode": config.sleep and platform.is_cuda,
        **_device_defaults(spec, config.tp, options),
        **(options.images or {}),
        **config.vllm,
        **(expert_arguments() if options.routed_experts else {}),
    }
    if spec.architecture in WITH_CHUNKS:
        # vLLM (0.32, `llama4.py`) scales queries only in engines for more than 32,768
        # tokens, unless a generation config says otherwise.
        is_scaled = spec.query_scaling is not None
        arguments["override_generation_config"] = {"attn_temperature_tuning": is_scaled}
    if not platform.is_cuda:
        if reason := why_no_kernel(spec.head_dim):
            raise RolloutError(reason)
        check_runs_here(
            arguments,
            experts=spec.moe is not None,
            is_recurrent=spec.is_recurrent,
            has_gates=spec.is_gated,
        )
        if spec.delta_net is not None:
            dtype = str(options.dtype).removeprefix("torch.")
            check_delta_net_runs_here(spec.delta_net, dtype)
    if arguments.get("quantization"):
        arguments |= quantised_arguments(
            arguments["quantization"], load_weights=options.load_weights
        )
    if drafts := arguments.get("speculative_config"):
        arguments["speculative_config"] = speculation(drafts)
        if more := overrides_for_head(drafts):
            arguments["hf_overrides"] = {**arguments.get("hf_overrides", {}), **more}
    if options.fp32_lm_head:
        # vLLM reads it from the model's config.json (`ModelConfig.head_dtype`).
        overrides = {**arguments.get("hf_overrides", {}), "head_dtype": "float32"}
        arguments["hf_overrides"] = overrides
    return arguments


def _device_defaults(
    spec: ModelSpec,
    tp_size: int,
    options: VLLMOptions,
) -> dict[str, Any]:
    if platform.is_cuda:
        # Triton is vLLM's default on Hopper. The default on Blackwell reorders experts,
        # which no reshard can write.
        may_have_experts = spec.moe is not None or not spec.is_tabled
        return (
            {"moe_backend": "triton"}
            if may_have_experts and not options.load_weights
            else {}
        )
    defaults: dict[str, Any] = vllm_cpu().engine_defaults(
        **_states(spec, tp_size, options.dtype),
        # A model may have Mamba layers alone.
        num_layers=max(1, spec.count_layers("attention")),
        num_kv_heads=max(1, spec.num_kv_heads // tp_size),
        head_dim=spec.head_dim,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        num_sequences=options.num_sequences,
        latent_attention=None if spec.mla is None else LATENT_ATTENTION,
    )
    # `check_runs_here` has the reason.
    return defaults | ({"enable_prefix_caching": False} if spec.is_recurrent else {})


def _states(spec: ModelSpec, tp_size: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the number of layers with a state and the bytes of one state on a rank, if there are such layers."""
    # States in float32, twice the 16 bits of others, and the last inputs of the convolution.
    if (net := spec.delta_net) is not None:
        per_head = net.key_head_dim * net.value_head_dim
        taps = (2 * net.key_width + net.value_width) * (net.conv_width - 1)
        numel = 2 * net.num_value_heads * per_head + taps
        num_states = sum(net.layers)
    elif (mamba := spec.mamba) is not None:
        # Every rank has a copy of a single group.
        rows = mamba.inner_size + 2 * max(mamba.group_rows, tp_size * mamba.state_size)
        numel = 2 * mamba.inner_size * mamba.state_size + rows * (mamba.conv_size - 1)
        num_states = spec.count_layers("mamba")
    else:
        return {}
    return {
        "num_states": num_states,
        "state_bytes": dtype.itemsize * numel // tp_size,
    }


def _place(tp_size: int) -> tuple[int, int, int]:
    """Return (replica, tp rank, number of replicas) of this rank."""
    if not dist.is_initialized():
        raise RolloutError(
            "vLLM runs inside a torchrun job: call torch.distributed.init_process_group first."
        )
    world_size = dist.get_world_size()
    if world_size % tp_size:
        fits = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise RolloutError(
            f"rollout.tp={tp_size} does not divide the world of {world_size} ranks. Choose one of {fits}."
        )
    replica, tp_rank = divmod(dist.get_rank(), tp_size)
    return replica, tp_rank, world_size // tp_size


def _check_model(spec: ModelSpec, tp_size: int, max_model_len: int) -> None:
    # Only the tp axis is checked: whether experts are split or whole depends on vLLM's
    # options. For models without a table, vLLM itself reports what it cannot split.
    if spec.is_tabled and (
        misfits_found := [
            misfit
            for misfit in misfits(spec, tp=tp_size, engine=True)
            if misfit.axis == "tp"
        ]
    ):
        raise RolloutError(f"rollout.tp={tp_size} {misfits_found[0].reason}")
    if max_model_len > spec.max_positions:
        raise RolloutError(
            f"prompts and responses of {max_model_len} tokens were asked for, but the model's context is "
            f"{spec.max_positions} (max_position_embeddings). Lower data.max_prompt_tokens or "
            "rollout.sampling.max_tokens."
        )


def _eager() -> AbstractContextManager[Any]:
    """Run vLLM's `torch.compile`d helpers as plain Python on a CPU: compiling them takes seconds and a C++ compiler."""
    return (
        nullcontext() if platform.is_cuda else torch.compiler.set_stance("force_eager")
    )


class _ConfigurationMade(Exception):
    """Ends the construction of an engine when its configuration is made."""


def make_configuration(model_folder: str, arguments: dict[str, Any]) -> None:
    """Make vLLM's configuration as the engine does, without weights. For a process that makes no engine.

    Raises:
        RolloutError: vLLM refuses an argument, or the arguments together.
    """
    from vllm.v1.engine.llm_engine import LLMEngine

    # Called in place of the engine's construction.
    def only_configure(engine_args: Any, usage_context: Any, **options: Any) -> None:
        engine_args.create_engine_config(usage_context)
        raise _ConfigurationMade

    original = LLMEngine.from_engine_args
    LLMEngine.from_engine_args = only_configure
    try:
        _start(model_folder, arguments)
    except _ConfigurationMade:
        return
    finally:
        LLMEngine.from_engine_args = original


def _start(model_folder: str, arguments: dict[str, Any]) -> LLM:
    from vllm import LLM

    with process_state_kept(), _eager():
        try:
            return LLM(model=model_folder, **arguments)
        except (TypeError, ValueError) as error:
            raise RolloutError(
                f"vLLM refuses to start on {model_folder}: {error}"
            ) from error
        except (AttributeError, KeyError, NotImplementedError) as error:
            raise RolloutError(
                f"vLLM does not build the model of {model_folder}: {type(error).__name__}: {error}. If that is a field "
                "of config.json, vLLM reads it under another name than transformers writes: take the published model's "
                "config.json. Else use rollout.engine=hf."
            ) from error
