"""Weight synchronisation with inference servers, which read a Hugging Face folder for each version."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from megaverl.data.batch import RolloutBatch
from megaverl.distributed.collectives import broadcast_json, on_first_rank, raise_together, together
from megaverl.errors import ReshardError
from megaverl.outside import read_json_file
from megaverl.rollout import sample_seed
from megaverl.rollout.engine import Generation
from megaverl.rollout.server_engine import ServerEngine
from megaverl.rollout.server_pool import PublishedWeights
from megaverl.weights.reshard import ReshardStats
from megaverl.workers.model import TrainingModel
from megaverl.workers.policy import Policy

FINGERPRINT = "fingerprint.json"
NUM_TOKENS = 16  # number of tokens whose log-probs are compared
FINGERPRINT_BATCH = 4096  # token limit of the comparison's micro-batch; large enough to hold it in one
TOLERANCE = {torch.float32: 1e-3}
ROUGH = 0.1  # nats; in 16 bits engine and trainer round differently


class ServerSync:
    """Counterpart of `WeightSync` for servers. Every rank of the actor and of the rollout takes part in each reshard.

    The actor's ranks export the weights to a folder, together with the actor's log-probs of a few tokens. The first
    rank of the rollout makes the servers read the folder (`ServerEngine.use`), compares their log-probs with the
    actor's, and broadcasts the result to the other ranks.

    Args:
        model: the actor on this rank. None: it lives on other ranks, or the run has no actor and a constant folder.
        engine: this rank's connection to the servers, or None.
        world: the ranks of this rank's role.
        group: the ranks of actor and rollout.
        folder: versions are written here.
        source_folder: folder of the original model, whose small files are copied.
        dtype: of the actor's weights.
        tolerance: largest allowed log-prob difference in nats. None: a default for `dtype`.
        max_tokens: smallest number of tokens that every server accepts.

    Attributes:
        weight_version: number of times that the servers' weights have changed.
    """

    def __init__(
        self,
        model: TrainingModel | None,
        engine: ServerEngine | None,
        world: dist.ProcessGroup,
        group: dist.ProcessGroup,
        *,
        folder: Path,
        source_folder: Path,
        dtype: torch.dtype,
        tolerance: float | None,
        max_tokens: int,
    ) -> None:
        self.weight_version = 0
        self._model, self._engine, self._world, self._group = model, engine, world, group
        self._folder, self._source_folder = folder, source_folder
        self._tolerance = tolerance or TOLERANCE.get(dtype, ROUGH)
        self._num_tokens = min(NUM_TOKENS, max_tokens - 2)  # leave room for one sampled token
        # Prefix of folder names that is unique among runs and restarts.
        self._run = broadcast_json(os.urandom(6).hex(), 0, group)
        self._number, self._whole = 0, False

    def source_changes(self) -> None:
        """Do nothing: servers share no memory with the actor. Called before the actor's weights change."""

    def reshard(self) -> ReshardStats:
        """Write the actor's weights, and make all servers read them. Collective over actor and rollout.

        Raises:
            CheckpointError: the folder cannot be written.
            RolloutError: no server could read the weights.
        """
        start = perf_counter()
        self._number += 1
        self._whole = False
        folder = self._folder / f"{self._run}-{self._number}"
        error: Exception | None = None
        if self._model is not None:
            try:
                self._write(self._model, folder)
            # Only the actor's ranks have the error here; `raise_together` passes it to the rollout's ranks.
            except Exception as caught:
                error = caught
        raise_together(error, self._group)
        self._use(folder)
        self._whole = True
        self.weight_version += 1
        sent = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if self._speaks else 0
        return ReshardStats(0, sent, 0, perf_counter() - start, 0, version=self.weight_version, busiest_sent=sent)

    @property
    def _speaks(self) -> bool:
        """Return whether this rank talks to the servers for its role."""
        return self._engine is not None and dist.get_rank(self._world) == 0

    def _write(self, model: TrainingModel, folder: Path) -> None:
        """Export the weights and the actor's log-probs. Collective over the actor's ranks."""
        model.export(folder, source_folder=self._source_folder, overwrite=True)
        tokens = fingerprint_tokens(model.vocab_size, self._num_tokens)
        log_probs = self._log_probs(model, tokens)

        def describe() -> None:
            text = json.dumps({"tokens": tokens, "log_probs": log_probs})
            (folder / FINGERPRINT).write_text(text, encoding="utf-8")

        on_first_rank(describe, model.grid.world)

    def _log_probs(self, model: TrainingModel, tokens: list[int]) -> list[float]:
        """Return the actor's log-probs of these tokens, after the first one. Collective over the actor's ranks."""
        given = Generation(tokens[1:], [0.0] * (len(tokens) - 1), "length")
        batch = RolloutBatch.from_generations([tokens[:1]], [given])
        policy = Policy(model, temperature=1.0, micro_batch_tokens=FINGERPRINT_BATCH)
        with model.on_device, torch.no_grad():
            found: list[float] = policy.log_probs(batch)[0].tolist()
        return found

    def _use(self, folder: Path) -> None:
        """Make the servers read the folder, and remove older versions."""
        if self._engine is None:
            return
        engine = self._engine
        with together(self._world):
            if self._speaks:
                engine.use(self._published(folder))
                self._remove_old()
        if not self._speaks:
            engine.use(PublishedWeights(str(folder), folder.name))

    def _remove_old(self) -> None:
        """Remove outdated versions that no server is reading.

        These are versions before the current one, and versions from before a restart of the run. A newer version may
        already be in the folder.
        """
        assert self._engine is not None
        kept = self._engine.pool.being_read()
        for folder in self._folder.glob("*-*"):
            found = re.fullmatch(r"([0-9a-f]{12})-(\d+)(\.tmp)?", folder.name)
            is_old = found and (found[1] != self._run or int(found[2]) < self._number)
            if is_old and str(folder.absolute()) not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def _published(self, folder: Path) -> PublishedWeights:
        try:
            known = read_json_file(folder / FINGERPRINT)
        except OSError as error:
            raise ReshardError(
                f"{folder}: the actor's first rank has written the weights there, and this rank cannot read them "
                f"({error}). Name a folder that both and all servers see: rollout.servers.folder."
            ) from error
        tokens, log_probs = tuple(known["tokens"]), tuple(known["log_probs"])
        return PublishedWeights(str(folder.absolute()), folder.name, tokens, log_probs, self._tolerance)

    def use_folder(self, folder: Path) -> None:
        """Load a constant folder into the servers. Collective over the role's ranks."""
        weights = PublishedWeights(str(folder.absolute()), f"{self._run}-0")
        assert self._engine is not None
        with together(self._world):
            if self._speaks:
                self._engine.use(weights)
        if not self._speaks:
            self._engine.use(weights)
        self._whole = True

    def wake(self) -> None:
        """Do nothing: servers are always awake."""

    def sleep(self) -> None:
        """Do nothing: servers are always awake."""

    def check_whole(self) -> None:
        """Check that the servers hold the actor's weights. Called before anything is generated.

        Raises:
            ReshardError: the last reshard failed.
        """
        if not self._whole:
            raise ReshardError(
                "the servers' weights are not those of the actor: the last reshard failed. Nothing can be generated "
                "until a whole one has passed."
            )


def fingerprint_tokens(vocab_size: int, count: int = NUM_TOKENS) -> list[int]:
    """Return a first token and `count` more, spread over the vocabulary; identical in every run."""
    return [sample_seed(0, 0, place, "fingerprint") % vocab_size for place in range(1 + count)]
