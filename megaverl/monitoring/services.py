"""Trackers of other projects: Weights & Biases, MLflow, SwanLab. Each is imported when it is asked for.

Where nobody is logged in they keep what they get in the run's folder, to be sent later, and never ask a question.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Mapping
from pathlib import Path

from megaverl.monitoring.backend import RunInfo


class Wandb:
    """Weights & Biases. WANDB_MODE, WANDB_API_KEY and `wandb login` say whether and where to send.

    Without a login: offline, into the run's folder; `wandb sync` sends it. A run that is resumed goes on in its own one
    there, whose id is kept in `wandb_run_id`; a fresh one gets a new id.
    """

    def __init__(self, info: RunInfo) -> None:
        wandb = importlib.import_module("wandb")
        asks = "prompt" in inspect.signature(wandb.login).parameters  # newer ones can be told not to
        offline = "WANDB_MODE" not in os.environ and not (wandb.login(prompt=False) if asks else wandb.api.api_key)
        self._run = wandb.init(
            project=info.project,
            name=info.name,
            id=_kept_id(info, "wandb_run_id"),
            resume="allow",
            dir=str(info.run_dir),
            config=dict(info.config),
            **({"mode": "offline"} if offline else {}),
        )
        Path(info.run_dir, "wandb_run_id").write_text(self._run.id)

    def write(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow. MLFLOW_TRACKING_URI names the server; without it, `mlflow.db` (or `mlruns`) in the run's folder.

    A run that is resumed goes on in its MLflow run, whose id is kept in `mlflow_run_id`.
    """

    def __init__(self, info: RunInfo) -> None:
        self._mlflow = importlib.import_module("mlflow")
        folder = info.run_dir.resolve()
        if "MLFLOW_TRACKING_URI" not in os.environ:
            has_database = importlib.util.find_spec("sqlalchemy") is not None
            self._mlflow.set_tracking_uri(
                f"sqlite:///{folder / 'mlflow.db'}" if has_database else f"file:{folder / 'mlruns'}"
            )
            if self._mlflow.get_experiment_by_name(info.project) is None:  # its own rule would be the working folder
                self._mlflow.create_experiment(info.project, (folder / "mlruns").as_uri())
        self._mlflow.set_experiment(info.project)
        known = _kept_id(info, "mlflow_run_id")
        self._mlflow.start_run(**({"run_id": known} if known else {"run_name": info.name}))
        Path(folder, "mlflow_run_id").write_text(self._mlflow.active_run().info.run_id)
        if not known:
            self._mlflow.log_dict(dict(info.config), "config.json")

    def write(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        # its names have fewer characters than ours: pass@1 becomes pass_1
        named = {re.sub(r"[^\w./ :-]", "_", name): value for name, value in metrics.items()}
        self._mlflow.log_metrics(named, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _kept_id(info: RunInfo, name: str) -> str | None:
    """The service's id of the run that this one goes on from; None: a fresh run."""
    kept = Path(info.run_dir, name)
    return kept.read_text().strip() if info.resume_step is not None and kept.is_file() else None


class SwanLab:
    """SwanLab. SWANLAB_MODE, SWANLAB_API_KEY and `swanlab login` say where to; without a key: offline."""

    def __init__(self, info: RunInfo) -> None:
        self._swanlab = importlib.import_module("swanlab")
        known = inspect.signature(self._swanlab.init).parameters
        options = {"project": info.project, "config": dict(info.config)}
        # 0.10 renamed these two
        options["name" if "name" in known else "experiment_name"] = info.name
        options["log_dir" if "log_dir" in known else "logdir"] = str(info.run_dir / "swanlog")
        if not {"SWANLAB_MODE", "SWANLAB_API_KEY"} & os.environ.keys():
            options["mode"] = "offline"
        self._swanlab.init(**options)

    def write(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def close(self) -> None:
        self._swanlab.finish()
