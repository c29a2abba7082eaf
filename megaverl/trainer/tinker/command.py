"""`megaverl serve tinker` on one rank: builds model, engine and worker, and serves until a signal ends it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import torch.distributed as dist

from megaverl.config import Config
from megaverl.controller.core import Controller
from megaverl.monitoring.console import Console
from megaverl.monitoring.timeline import Timeline
from megaverl.trainer.build import Builder
from megaverl.trainer.job import Job, PreemptionHandler, Stages, kept_objects
from megaverl.trainer.serving import serve_program
from megaverl.trainer.tinker.http_server import TinkerServer
from megaverl.trainer.tinker.program import (
    AdapterGroup,
    RequestQueue,
    serve_requests,
)
from megaverl.trainer.tinker.service import (
    ServedModel,
    TinkerService,
    saved_checkpoints,
)
from megaverl.trainer.tinker.worker import ROLE, AdapterWorker
from megaverl.trainer.trainer_engines import make_trainable
from megaverl.workers.model import TrainingModel
from megaverl.workers.optimizers import MegatronTrainable


def serve_tinker(config: Config, console: Console, job: Job) -> None:
    """Serve clients until the job receives SIGTERM. Every rank of the job calls it."""
    stages = Stages(Timeline(dist.get_rank()), job)
    builder = Builder(config)
    stages.status("loading the model")
    model = builder.model(config.actor, ROLE)
    trainable = make_trainable(model, config.actor, config.actor.optimizer, 1)
    assert isinstance(trainable, MegatronTrainable), "the configuration refuses others"
    stages.status("starting the engine")
    rollout = builder.rollout(model)
    name = config.tinker.model_name or config.model.path
    worker = AdapterWorker(
        trainable,
        rollout,
        stages,
        micro_batch_tokens=config.actor.micro_batch_tokens,
        base=config.model.path,
    )
    served = ServedModel(
        name=name,
        tokenizer=str(config.model.tokenizer or builder.folder),
        vocab_size=builder.spec.vocab_size,
        max_tokens=config.max_tokens,
        rank=model.adapters.config.rank if model.adapters is not None else 0,
        trained=describe_adapters(model),
    )
    leave = PreemptionHandler()
    token_env = config.tinker.token_env

    async def program(controller: Controller) -> None:
        adapters = AdapterGroup("adapters", range(controller.num_ranks), controller)
        queue = RequestQueue()
        service = TinkerService(
            served,
            builder.tokenizer,
            queue,
            saved_checkpoints(config.run_dir),
            seed=config.run.seed,
            session_seconds=config.tinker.session_minutes * 60,
        )
        token = None if token_env is None else os.environ[token_env]
        server = TinkerServer(
            config.tinker.host, config.tinker.port, token, service.answer
        )
        console.print(f"serving {name} at {server.url} (SIGTERM ends the server)")
        try:
            await serve_requests(
                adapters, queue, service.expired_models, lambda: bool(leave.number)
            )
        finally:
            await asyncio.to_thread(server.close)

    with leave.listening(), kept_objects():
        serve_program(
            program,
            {"adapters": worker},
            config=config,
            stages=stages,
            leave=leave,
            console=console,
        )


def describe_adapters(model: TrainingModel) -> str:
    """Return a sentence for clients about the layers that have adapters."""
    assert model.adapters is not None, "the configuration requires actor.lora"
    layers: Sequence[str] = sorted(
        {low_rank.projection for low_rank in model.adapters.low_ranks.values()}
    )
    lora = model.adapters.config
    return (
        f"this server trains adapters of rank {lora.rank} and alpha {lora.alpha:g} on {', '.join(layers)}; the "
        "unembedding is not trained."
    )
