"""Locate a model's files: a local folder, or a hub (`org/name`) whose weights are downloaded while others are read.

Small files come first, then the safetensors files one after the other in the
background. The first rank of each machine downloads, and the others read its files.
Files in the hub's cache are not downloaded again, and with HF_HUB_OFFLINE=1 nothing is.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from megaverl.config.run import is_hub_name
from megaverl.distributed.collectives import gather_json, reduce_json, together
from megaverl.errors import ModelError
from megaverl.weights.export import COPIED_SUFFIXES
from megaverl.weights.stored import INDEX_FILE, SINGLE_FILE, read_weight_map

logger = logging.getLogger(__name__)

HubName = Literal["huggingface", "modelscope"]
CONFIG_FILE = "config.json"
# Interval at which ranks that wait for a file log that it is still downloading.
WAIT_SECONDS = 20.0


@dataclass
class ModelFiles:
    """Files of one model, on every rank.

    Attributes:
        folder: folder with all small files, and with the weights once they have arrived.
        shards: names of the safetensors files, in order of arrival.

    Example:
            files = find_model("org/name")
            for path in files.arriving() or ():
                load(path)  # the other files arrive meanwhile
    """

    folder: Path
    shards: Sequence[str] = ()
    _futures: dict[str, Future[Path]] = field(default_factory=dict, repr=False)
    _complete: bool = True

    def arriving(self) -> Iterator[Path] | None:
        """Return an iterator that yields each safetensors file once every machine has it, or None if all are there.

        Collective over the default group.

        Raises:
            ModelError: on every rank: a file could not be downloaded.
        """
        # Known on every rank alike, so no collective is needed to agree.
        if self._complete:
            return None
        return self._arrive()

    def wait(self) -> Path:
        """Wait for all files and return the folder. Collective over the default group."""
        for _ in self.arriving() or ():
            pass
        return self.folder

    def _arrive(self) -> Iterator[Path]:
        """Yield each file once every machine has it."""
        for name in self.shards:
            # None if another rank of this machine downloads the file.
            future = self._futures.get(name)
            while True:
                is_done = True
                if future is not None:
                    wait([future], timeout=WAIT_SECONDS)
                    is_done = future.done()
                with together():
                    if future is not None and is_done:
                        # Raises the download's error, which `together` passes to all
                        # ranks.
                        future.result()
                # Ranks communicate at least every WAIT_SECONDS. A longer silence during
                # a download would look like a lost rank.
                if reduce_json(is_done, all):
                    break
            yield self.folder / name
        self._complete = True


def find_model(
    path: str,
    *,
    revision: str | None = None,
    hub: HubName = "huggingface",
    offload_folder: str | Path | None = None,
    trust_remote_code: bool = False,
    with_weights: bool = True,
    endpoint: str | None = None,
) -> ModelFiles:
    """Return the files of a local folder or a hub's model.

    A hub's small files are downloaded before this returns; its weights follow in the
    background.

    Collective over the default group.

    Args:
        path: a folder, or `org/name`.
        revision: branch, tag or commit on the hub. None: the main branch.
        hub: hub to search.
        offload_folder: folder for downloads. None: the hub's own cache.
        trust_remote_code: download Python files too.
        with_weights: False downloads the small files only.
        endpoint: URL of the hub. None: the library's default (HF_ENDPOINT).

    Raises:
        ModelError: on every rank: no such folder or model, no access, no connection, or no safetensors.
    """
    folder = Path(path)
    if folder.is_dir():
        if trust_remote_code:
            _warn_of_code(path)
        return ModelFiles(folder)
    with together():
        if not is_hub_name(path):
            problem = (
                "a file, not a folder"
                if folder.exists()
                else f"no such folder (looked in {os.getcwd()})"
            )
            raise ModelError(
                f"model.path: {path}: {problem}. Name a folder, or a model on a hub as org/name, such as "
                "Qwen/Qwen3-0.6B."
            )
    if trust_remote_code:
        _warn_of_code(path)
    local_dir = (
        Path(offload_folder) / path.replace("/", "--")
        if offload_folder is not None
        else None
    )
    open_hub = ModelScopeHub if hub == "modelscope" else HuggingFaceHub
    return _fetch(
        path,
        lambda: open_hub(path, revision, local_dir, endpoint),
        trust_remote_code,
        with_weights,
    )


def _fetch(
    path: str,
    open_hub: Callable[[], HuggingFaceHub | ModelScopeHub],
    trust_remote_code: bool,
    with_weights: bool,
) -> ModelFiles:
    """Download the small files on the first rank of each machine, start downloading weights, and share the results."""
    rank = dist.get_rank()
    # One entry per rank. The machine's number comes from torchrun.
    machines = gather_json(os.environ.get("GROUP_RANK", "0"))
    # The first rank of the job on each machine downloads for that machine.
    leader = machines.index(machines[rank]) == rank
    local_files: list[Any] = [machines[rank], None, []]
    futures: dict[str, Future[Path]] = {}
    # Collective: all ranks raise if one machine's download fails.
    with together():
        if leader:
            hub = open_hub()
            names = hub.list_files()
            # Without this file transformers cannot know the architecture.
            if CONFIG_FILE not in names:
                raise ModelError(
                    f"model.path: {path}: has no {CONFIG_FILE} on the hub. Name a model for transformers."
                )
            small = {
                name: hub.fetch(name) for name in _small_files(names, trust_remote_code)
            }
            folder = small[CONFIG_FILE].parent
            shards = _shards(path, folder, names) if with_weights else []
            # Machines may have their caches in different folders, so each rank takes
            # the entry of its own machine.
            local_files[1:] = [str(folder), shards]
            futures = _in_background(hub.fetch, shards)
    # Every rank needs the answer of its machine's first rank.
    all_files = gather_json(local_files)
    machine = local_files[0]
    folder, shards = next(
        (place, names)
        for group, place, names in all_files
        if group == machine and place
    )
    if rank == 0 and shards:
        logger.info("%s: %d weight files on their way to %s", path, len(shards), folder)
    # Small files are complete here. Weights follow in the background while the model is
    # built.
    return ModelFiles(Path(folder), shards, futures, not shards)


def _in_background(
    fetch: Callable[[str], Path], names: Sequence[str]
) -> dict[str, Future[Path]]:
    """Download files one after the other in a thread. The thread does not keep the process alive."""
    # Created before the thread starts, so that waiting for any file is possible at
    # once.
    futures: dict[str, Future[Path]] = {name: Future() for name in names}

    def work() -> None:
        for name in names:
            try:
                futures[name].set_result(fetch(name))
            # Errors are raised on the thread that waits for the file.
            # The remaining files fail with the same error, and nothing waits for them
            # forever.
            except BaseException as error:
                for future in futures.values():
                    if not future.done():
                        future.set_exception(error)
                return

    # A daemon thread: a run that fails must not wait for a download of hours.
    threading.Thread(target=work, name="hub", daemon=True).start()
    return futures


def _small_files(names: Sequence[str], trust_remote_code: bool) -> list[str]:
    """Return the files of a model that are no weights. Python files are included only with `trust_remote_code`."""
    suffixes = tuple(
        suffix for suffix in COPIED_SUFFIXES if suffix != ".py" or trust_remote_code
    )
    return [name for name in names if "/" not in name and name.endswith(suffixes)]


def _shards(path: str, folder: Path, names: Sequence[str]) -> list[str]:
    """Return the names of the model's safetensors files.

    Raises:
        ModelError: the index names a missing file, or there are no safetensors.
    """
    if INDEX_FILE in names:
        # Many weights name the same file. Each is listed once.
        shards = list(dict.fromkeys(read_weight_map(folder / INDEX_FILE).values()))
        missing = [shard for shard in shards if shard not in names]
        if missing:
            raise ModelError(
                f"model.path: {path}: {INDEX_FILE} names {', '.join(missing)}, which the hub does not have. "
                "Choose another revision (model.revision), or tell the model's owner."
            )
        return sorted(shards)
    if SINGLE_FILE in names:
        return [SINGLE_FILE]
    other_files = [
        name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf"))
    ]
    raise ModelError(
        f"model.path: {path}: has no safetensors "
        f"weights{', only ' + ', '.join(other_files[:3]) if other_files else ''}. "
        "Pickled weights can run code and are not loaded; choose a revision with safetensors, or convert the model."
    )


_warned: set[str] = set()


def _warn_of_code(path: str) -> None:
    """Warn about remote code once for each model and machine."""
    # One line per machine is enough; a job may have thousands of ranks.
    if path not in _warned and os.environ.get("LOCAL_RANK", "0") == "0":
        _warned.add(path)
        logger.warning(
            "model.trust_remote_code=true: Python files that come with %s will run in every rank, with your rights on "
            "this machine and network. Read them first, and pin them with model.revision=COMMIT.",
            path,
        )


class HuggingFaceHub:
    """Access to Hugging Face's hub with `huggingface_hub`.

    Its cache, tokens (HF_TOKEN, `hf auth login`) and offline mode apply.
    """

    def __init__(
        self,
        path: str,
        revision: str | None,
        local_dir: Path | None,
        endpoint: str | None,
    ) -> None:
        self._path = path
        self._revision = revision
        self._local_dir = local_dir
        self._endpoint = endpoint or os.environ.get("HF_ENDPOINT")
        self._commit = revision
        self._cached_only = False

    def list_files(self) -> Sequence[str]:
        """Return the names of all files of the revision, and pin later downloads to its commit."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import OfflineModeIsEnabled

        try:
            # A single request for the whole list.
            info = HfApi(endpoint=self._endpoint).model_info(
                self._path, revision=self._revision
            )
        except OfflineModeIsEnabled:
            return self._list_cached("HF_HUB_OFFLINE is set")
        # huggingface_hub passes on any error of its HTTP library.
        except Exception as error:
            if _is_no_connection(error):
                return self._list_cached(
                    f"the hub cannot be reached ({type(error).__name__}: {error})"
                )
            raise self._explained(error) from error
        # From here on a branch that moves during the download cannot mix two revisions.
        self._commit = info.sha or self._revision
        return [sibling.rfilename for sibling in info.siblings or ()]

    def fetch(self, name: str) -> Path:
        """Return the path of a file in the cache, downloading it if needed."""
        from huggingface_hub import hf_hub_download

        # Request one file by branch name. Otherwise the cache would not know offline
        # which commit the branch was.
        # Other files are asked for by commit.
        revision = self._revision if name == CONFIG_FILE else self._commit
        try:
            return Path(
                hf_hub_download(
                    self._path,
                    name,
                    revision=revision,
                    local_dir=self._local_dir,
                    endpoint=self._endpoint,
                    local_files_only=self._cached_only,
                )
            )
        # huggingface_hub passes on any error of its HTTP library.
        except Exception as error:
            raise self._explained(error, name) from error

    def _list_cached(self, reason: str) -> Sequence[str]:
        """Return the files of the cached revision.

        Raises:
            ModelError: the cache lacks the model or some of its weights.
        """
        from huggingface_hub import snapshot_download

        try:
            folder = Path(
                snapshot_download(
                    self._path,
                    revision=self._revision,
                    local_dir=self._local_dir,
                    local_files_only=True,
                )
            )
        except Exception as error:
            raise ModelError(
                f"model.path: {self._path}: no such folder in {os.getcwd()}, not in the hub's cache, and "
                f"{reason}. Fetch "
                "it where there is a connection, or name a folder."
            ) from error
        self._cached_only = True
        logger.warning("%s: %s; taken from the cache: %s", self._path, reason, folder)
        names = [file.name for file in folder.iterdir() if file.is_file()]
        shards = (
            set(read_weight_map(folder / INDEX_FILE).values())
            if INDEX_FILE in names
            else {SINGLE_FILE}
        )
        missing = sorted(shards.difference(names))
        if missing:
            raise ModelError(
                f"model.path: {self._path}: the cache does not have {', '.join(missing)}, and {reason}. "
                "Download the rest on a machine with a connection."
            )
        return names

    def _explained(self, error: Exception, name: str = "") -> ModelError:
        """Return a ModelError that says what went wrong and what to do."""
        from huggingface_hub import errors

        source = f"model.path: {self._path}{f': {name}' if name else ''}"
        at = f" at revision {self._revision}" if self._revision else ""
        if isinstance(error, errors.GatedRepoError):
            return ModelError(
                f"{source}: the hub asks for its terms to be accepted first. Do so on the model's page, and "
                "log in with `hf auth login` or HF_TOKEN."
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            status = getattr(getattr(error, "response", None), "status_code", 404)
            return ModelError(
                f"{source}: no such model on the hub, or a private one ({status}); and no such folder in "
                f"{os.getcwd()}. "
                "Look at the spelling, or log in with `hf auth login` or HF_TOKEN."
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return ModelError(
                f"{source}: no revision {self._revision!r}. Fix model.revision (branch, tag or commit)."
            )
        if isinstance(error, errors.EntryNotFoundError) and not isinstance(
            error, errors.LocalEntryNotFoundError
        ):
            return ModelError(
                f"{source}: not found{at}. Choose another revision (model.revision), or tell its owner."
            )
        if isinstance(error, errors.HFValidationError):
            return ModelError(
                f"{source}: not a name of the hub ({error}). Name it as org/name."
            )
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            fix = (
                "Log in with `hf auth login` or HF_TOKEN."
                if status in (401, 403)
                else "Try again later."
            )
            return ModelError(f"{source}: the hub answered {status}. {fix}")
        reason = (str(error).strip().splitlines() or [""])[0]
        return ModelError(
            f"{source}: the download was interrupted ({type(error).__name__}: {reason}). What was downloaded "
            "is kept: start again to continue."
        )


def _is_no_connection(error: Exception) -> bool:
    """Return whether an HTTP library failed to reach the hub.

    Compared by name, since the library differs by version.
    """
    # Compared by name, since huggingface_hub has used both requests and httpx.
    return type(error).__name__ in (
        "ConnectError",
        "ConnectTimeout",
        "ConnectionError",
        "ReadTimeout",
        "ProxyError",
    )


class ModelScopeHub:
    """Access to ModelScope with the optional package `modelscope`."""

    def __init__(
        self,
        path: str,
        revision: str | None,
        local_dir: Path | None,
        endpoint: str | None,
    ) -> None:
        self._path = path
        self._revision = revision
        self._local_dir = local_dir
        self._endpoint = endpoint
        try:
            self._api = importlib.import_module("modelscope.hub.api").HubApi(
                endpoint=endpoint
            )
            self._download = importlib.import_module(
                "modelscope.hub.file_download"
            ).model_file_download
        except ImportError:
            raise ModelError(
                "model.hub=modelscope needs the package modelscope. Run: pip install modelscope, or set "
                "model.hub=huggingface."
            ) from None

    def list_files(self) -> Sequence[str]:
        """Return the names of all files of the revision."""
        try:
            files = self._api.get_model_files(
                self._path, revision=self._revision or "master", recursive=True
            )
        # modelscope passes on any error of the libraries below it.
        except Exception as error:
            raise ModelError(
                f"model.path: {self._path}: modelscope does not list it ({type(error).__name__}: {error}). Look at the "
                "spelling and model.revision, or log in with `modelscope login`."
            ) from error
        return [file["Path"] for file in files if file.get("Type") != "tree"]

    def fetch(self, name: str) -> Path:
        """Return the path of a file, downloading it if needed."""
        options: dict[str, Any] = (
            {"local_dir": str(self._local_dir)} if self._local_dir else {}
        )
        revision = self._revision or "master"
        try:
            return Path(
                self._download(
                    self._path,
                    name,
                    revision=revision,
                    endpoint=self._endpoint,
                    **options,
                )
            )
        # modelscope passes on any error of the libraries below it.
        except Exception as error:
            raise ModelError(
                f"model.path: {self._path}: {name}: the download was interrupted ({type(error).__name__}: {error}). "
                "Start again."
            ) from error
