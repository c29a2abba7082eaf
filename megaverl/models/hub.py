"""Where a model's files come from: a folder, or a hub (`org/name`), whose weights arrive while others are being read.

Small files come first, then the safetensors files one behind the other, in the background. The first rank of each
machine fetches; the others read what it fetched. Nothing is fetched that is already in the hub's cache, and nothing
at all where HF_HUB_OFFLINE=1 is set.
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
WAIT_SECONDS = 20.0  # how often ranks that wait for a file hear that it is still coming


@dataclass
class ModelFiles:
    """The files of one model, on every rank.

    Attributes:
        folder: where all small files are, and the weights when they have come.
        shards: names of the safetensors files, in the order in which they come.
    """

    folder: Path
    shards: Sequence[str] = ()
    _futures: dict[str, Future[Path]] = field(default_factory=dict, repr=False)
    _complete: bool = True

    def arriving(self) -> Iterator[Path] | None:
        """Each safetensors file when it is there on every machine; None: all are. Every rank takes part.

        Raises:
            ModelError: on every rank: a file could not be fetched.
        """
        if self._complete:
            return None
        return self._arrive()

    def wait(self) -> Path:
        """The folder with everything in it. Every rank takes part."""
        for _ in self.arriving() or ():
            pass
        return self.folder

    def _arrive(self) -> Iterator[Path]:
        for name in self.shards:
            future = self._futures.get(name)  # None: another rank of this machine fetches
            while True:
                there = True
                if future is not None:
                    wait([future], timeout=WAIT_SECONDS)
                    there = future.done()
                with together():
                    if future is not None and there:
                        future.result()
                # a word now and then, or a long download would look like a lost rank
                if reduce_json(there, all):
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
    """A folder that exists, or a model on a hub: its small files fetched, its weights on their way.

    Every rank of the default group takes part.

    Args:
        path: a folder, or `org/name`.
        revision: branch, tag or commit of a hub's model; None: its main branch.
        offload_folder: keep what is downloaded here instead of in the hub's own cache.
        trust_remote_code: fetch Python files too.
        with_weights: fetch them; else only the small files.
        endpoint: of the hub; None: the library's (HF_ENDPOINT).

    Raises:
        ModelError: on every rank: no such folder or model, no rights, no connection, no safetensors.
    """
    folder = Path(path)
    if folder.is_dir():
        if trust_remote_code:
            _warn_of_code(path)
        return ModelFiles(folder)
    with together():
        if not is_hub_name(path):
            what = "a file, not a folder" if folder.exists() else f"no such folder (looked in {os.getcwd()})"
            raise ModelError(
                f"model.path: {path}: {what}. Name a folder, or a model on a hub as org/name, such as Qwen/Qwen3-0.6B."
            )
    if trust_remote_code:
        _warn_of_code(path)
    local_dir = Path(offload_folder) / path.replace("/", "--") if offload_folder is not None else None
    open_hub = ModelScopeHub if hub == "modelscope" else HuggingFaceHub
    return _fetch(path, lambda: open_hub(path, revision, local_dir, endpoint), trust_remote_code, with_weights)


def _fetch(
    path: str, open_hub: Callable[[], HuggingFaceHub | ModelScopeHub], trust_remote_code: bool, with_weights: bool
) -> ModelFiles:
    rank, machines = dist.get_rank(), gather_json(os.environ.get("GROUP_RANK", "0"))
    leader = machines.index(machines[rank]) == rank  # the first rank of this world on its machine
    found: list[Any] = [machines[rank], None, []]
    futures: dict[str, Future[Path]] = {}
    with together():
        if leader:
            hub = open_hub()
            names = hub.list_files()
            if CONFIG_FILE not in names:
                raise ModelError(f"model.path: {path}: has no {CONFIG_FILE} on the hub. Name a model for transformers.")
            small = {name: hub.fetch(name) for name in _small_files(names, trust_remote_code)}
            folder = small[CONFIG_FILE].parent
            shards = _shards(path, folder, names) if with_weights else []
            found[1:] = [str(folder), shards]
            futures = _in_background(hub.fetch, shards)
    all_found = gather_json(found)
    machine = found[0]
    folder, shards = next((place, names) for group, place, names in all_found if group == machine and place)
    if rank == 0 and shards:
        logger.info("%s: %d weight files on their way to %s", path, len(shards), folder)
    return ModelFiles(Path(folder), shards, futures, not shards)


def _in_background(fetch: Callable[[str], Path], names: Sequence[str]) -> dict[str, Future[Path]]:
    """Fetch files one behind the other. Nobody waits for the thread when the process ends early."""
    futures: dict[str, Future[Path]] = {name: Future() for name in names}

    def work() -> None:
        for name in names:
            try:
                futures[name].set_result(fetch(name))
            except BaseException as error:  # raised where a file is waited for
                for future in futures.values():
                    if not future.done():
                        future.set_exception(error)
                return

    threading.Thread(target=work, name="hub", daemon=True).start()
    return futures


def _small_files(names: Sequence[str], trust_remote_code: bool) -> list[str]:
    """What belongs to a model besides its weights; of code only what was asked for."""
    suffixes = tuple(suffix for suffix in COPIED_SUFFIXES if suffix != ".py" or trust_remote_code)
    return [name for name in names if "/" not in name and name.endswith(suffixes)]


def _shards(path: str, folder: Path, names: Sequence[str]) -> list[str]:
    if INDEX_FILE in names:
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
    others = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf"))]
    raise ModelError(
        f"model.path: {path}: has no safetensors weights{', only ' + ', '.join(others[:3]) if others else ''}. "
        "Pickled weights can run code and are not loaded; choose a revision with safetensors, or convert the model."
    )


_warned: set[str] = set()


def _warn_of_code(path: str) -> None:
    """Said once for each model, and once on each machine."""
    if path not in _warned and os.environ.get("LOCAL_RANK", "0") == "0":
        _warned.add(path)
        logger.warning(
            "model.trust_remote_code=true: Python files that come with %s will run in every rank, with your rights on "
            "this machine and network. Read them first, and pin them with model.revision=COMMIT.",
            path,
        )


class HuggingFaceHub:
    """Through `huggingface_hub`: its cache, its tokens (HF_TOKEN, `hf auth login`), its offline mode."""

    def __init__(self, path: str, revision: str | None, local_dir: Path | None, endpoint: str | None) -> None:
        self._path, self._revision, self._local_dir = path, revision, local_dir
        self._endpoint = endpoint or os.environ.get("HF_ENDPOINT")
        self._commit = revision
        self._cached_only = False

    def list_files(self) -> Sequence[str]:
        """The names of all files of the revision; from then on the same revision is meant."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import OfflineModeIsEnabled

        try:
            info = HfApi(endpoint=self._endpoint).model_info(self._path, revision=self._revision)
        except OfflineModeIsEnabled:
            return self._list_cached("HF_HUB_OFFLINE is set")
        except Exception as error:  # whatever the HTTP library raises
            if _is_no_connection(error):
                return self._list_cached(f"the hub cannot be reached ({type(error).__name__}: {error})")
            raise self._explained(error) from error
        self._commit = info.sha or self._revision
        return [sibling.rfilename for sibling in info.siblings or ()]

    def fetch(self, name: str) -> Path:
        """One file, from the cache or the hub; returns where it lies."""
        from huggingface_hub import hf_hub_download

        # one file is asked for by the branch, or the cache would not know offline what the branch was
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
        except Exception as error:  # whatever the HTTP library raises
            raise self._explained(error, name) from error

    def _list_cached(self, why: str) -> Sequence[str]:
        from huggingface_hub import snapshot_download

        try:
            folder = Path(
                snapshot_download(self._path, revision=self._revision, local_dir=self._local_dir, local_files_only=True)
            )
        except Exception as error:
            raise ModelError(
                f"model.path: {self._path}: no such folder in {os.getcwd()}, not in the hub's cache, and {why}. Fetch "
                "it where there is a connection, or name a folder."
            ) from error
        self._cached_only = True
        logger.warning("%s: %s; taken from the cache: %s", self._path, why, folder)
        names = [file.name for file in folder.iterdir() if file.is_file()]
        shards = set(read_weight_map(folder / INDEX_FILE).values()) if INDEX_FILE in names else {SINGLE_FILE}
        missing = sorted(shards.difference(names))
        if missing:
            raise ModelError(
                f"model.path: {self._path}: the cache lacks {', '.join(missing)}, and {why}. Fetch the rest where "
                "there is a connection."
            )
        return names

    def _explained(self, error: Exception, name: str = "") -> ModelError:
        """The error in words that say what to do."""
        from huggingface_hub import errors

        what = f"model.path: {self._path}{f': {name}' if name else ''}"
        at = f" at revision {self._revision}" if self._revision else ""
        if isinstance(error, errors.GatedRepoError):
            return ModelError(
                f"{what}: the hub asks for its terms to be accepted first. Do so on the model's page, and "
                "log in with `hf auth login` or HF_TOKEN."
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            status = getattr(getattr(error, "response", None), "status_code", 404)
            return ModelError(
                f"{what}: no such model on the hub, or a private one ({status}); and no such folder in {os.getcwd()}. "
                "Look at the spelling, or log in with `hf auth login` or HF_TOKEN."
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return ModelError(f"{what}: no revision {self._revision!r}. Fix model.revision (branch, tag or commit).")
        if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
            return ModelError(f"{what}: not found{at}. Choose another revision (model.revision), or tell its owner.")
        if isinstance(error, errors.HFValidationError):
            return ModelError(f"{what}: not a name of the hub ({error}). Name it as org/name.")
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            fix = "Log in with `hf auth login` or HF_TOKEN." if status in (401, 403) else "Try again later."
            return ModelError(f"{what}: the hub answered {status}. {fix}")
        reason = (str(error).strip().splitlines() or [""])[0]
        return ModelError(
            f"{what}: the download broke off ({type(error).__name__}: {reason}). What has come is kept: start again to "
            "go on from there."
        )


def _is_no_connection(error: Exception) -> bool:
    return type(error).__name__ in ("ConnectError", "ConnectTimeout", "ConnectionError", "ReadTimeout", "ProxyError")


class ModelScopeHub:
    """Through `modelscope`, which is installed only where it is wanted."""

    def __init__(self, path: str, revision: str | None, local_dir: Path | None, endpoint: str | None) -> None:
        self._path, self._revision, self._local_dir, self._endpoint = path, revision, local_dir, endpoint
        try:
            self._api = importlib.import_module("modelscope.hub.api").HubApi(endpoint=endpoint)
            self._download = importlib.import_module("modelscope.hub.file_download").model_file_download
        except ImportError:
            raise ModelError(
                "model.hub=modelscope needs the package modelscope. Run: pip install modelscope, or set "
                "model.hub=huggingface."
            ) from None

    def list_files(self) -> Sequence[str]:
        try:
            files = self._api.get_model_files(self._path, revision=self._revision or "master", recursive=True)
        except Exception as error:  # whatever the library raises
            raise ModelError(
                f"model.path: {self._path}: modelscope does not list it ({type(error).__name__}: {error}). Look at the "
                "spelling and model.revision, or log in with `modelscope login`."
            ) from error
        return [file["Path"] for file in files if file.get("Type") != "tree"]

    def fetch(self, name: str) -> Path:
        options: dict[str, Any] = {"local_dir": str(self._local_dir)} if self._local_dir else {}
        revision = self._revision or "master"
        try:
            return Path(self._download(self._path, name, revision=revision, endpoint=self._endpoint, **options))
        except Exception as error:  # whatever the library raises
            raise ModelError(
                f"model.path: {self._path}: {name}: the download broke off ({type(error).__name__}: {error}). "
                "Start again."
            ) from error
