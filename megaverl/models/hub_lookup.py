"""Check once, before ranks start, that the models which a configuration names exist.

`org/name` looks like a relative path, and a missing folder looks like a model on a hub.
Without this check every rank would find out after its start. The module imports neither
torch nor transformers.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from megaverl.config import Config
from megaverl.config.errors import ConfigIssue
from megaverl.config.run import is_hub_name
from megaverl.user_code import describe

logger = logging.getLogger(__name__)

# Deadline for the hub's answer.
ANSWER_SECONDS = 5.0


def missing_models(
    config: Config, *, on_this_machine: bool = True
) -> list[ConfigIssue]:
    """Return an issue for every model that is neither a local folder, nor in the hub's cache, nor on the hub.

    No answer within `ANSWER_SECONDS` is not an issue: the ranks ask again and wait
    longer.

    Args:
        on_this_machine: the run starts on this machine, so an unreachable hub is an issue too.
    """
    if config.model.hub != "huggingface":
        return []
    named = {"model.path": config.model.path, "model.tokenizer": config.model.tokenizer}
    named |= {
        f"{role}.path": getattr(config, role).path
        for role in ("critic", "reference", "reward_model")
    }
    named |= {
        f"reward.{index}.path": entry.path for index, entry in enumerate(config.reward)
    }
    if config.draft.train:
        named["rollout.vllm.speculative_config.model"] = config.draft_path
    issues = []
    for key, name in named.items():
        revision = config.model.revision if key == "model.path" else None
        if name is None or not is_hub_name(name):
            continue
        reason, is_reached = _why_missing(name, revision, _cache_of(config, name))
        if reason and (is_reached or on_this_machine):
            issues.append(ConfigIssue(key, f"{name}: {reason}", config.place(key)))
    return issues


def _cache_of(config: Config, name: str) -> Path | None:
    """Return the folder for downloads of the model `name`, or None for the hub's own cache."""
    folder = config.model.offload_folder
    return None if folder is None else Path(folder) / name.replace("/", "--")


def _why_missing(
    name: str, revision: str | None, local_dir: Path | None
) -> tuple[str, bool]:
    """Return why a model cannot be found and what to do, and whether that answer came from the hub.

    The reason is "" if the model was found or its existence is unknown.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        snapshot_download(
            name, revision=revision, local_dir=local_dir, local_files_only=True
        )
        return "", False
    except LocalEntryNotFoundError:
        # The usual case of a model that was never downloaded: the hub is asked.
        pass
    # A damaged cache may raise anything. The hub is asked as well, and the ranks may
    # stumble over the same damage.
    except Exception as error:
        logger.warning(
            "%s: the cache of the hub cannot be read (%s), so the hub is asked.",
            name,
            describe(error),
        )
    here = f"no such folder in {os.getcwd()}"
    try:
        HfApi(endpoint=os.environ.get("HF_ENDPOINT")).model_info(
            name, revision=revision, timeout=ANSWER_SECONDS
        )
    except OfflineModeIsEnabled:
        fix = "Correct the path, or fetch the model first."
        return (
            f"{here}, not in the hub's cache, and HF_HUB_OFFLINE is set. {fix}",
            False,
        )
    except GatedRepoError:
        # The model exists. The ranks report how to get access when they download it.
        return "", False
    except RepositoryNotFoundError:
        fix = "Correct the path, or log in: hf auth login."
        return f"{here}, and no such model on the hub, or a private one. {fix}", True
    # huggingface_hub passes on any error of its HTTP library.
    except Exception as error:
        if type(error).__name__ not in ("ConnectError", "ConnectionError"):
            return "", False
        fix = "Correct the path, or fetch the model where there is a connection."
        return (
            f"{here}, not in the hub's cache, and the hub is not reached ({error}). {fix}",
            False,
        )
    return "", False
