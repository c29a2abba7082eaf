"""Backends for metrics: files, TensorBoard, Weights & Biases, MLflow, SwanLab, Trackio, and trackers of the user."""

from __future__ import annotations

import csv
import html
import importlib
import importlib.util
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megaverl.errors import ConfigError
from megaverl.outside import read_json


class JsonLines:
    """Backend of `metrics.jsonl`: one JSON object per line, flushed at once.

    Numbers that JSON cannot express are the strings "NaN", "Infinity" and "-Infinity",
    which `read_metrics` converts back. A resumed run drops lines after the resumed step
    and an incomplete last line. A fresh run in a used folder renames the older file to
    metrics.N.jsonl.
    """

    def __init__(self, info: RunInfo) -> None:
        path = info.run_dir / "metrics.jsonl"
        _start_file(
            path, info.resume_step, lambda: _json_lines_until(path, info.resume_step)
        )
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        record: dict[str, Any] = {"step": step, "time": round(seconds, 3)}
        for key, value in metrics.items():
            record[key] = _json_number(value)
        self._file.write(json.dumps(record) + "\n")
        # A run that is killed keeps all its finished steps.
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Csv:
    """Backend of `metrics.csv`: one column per metric. The first value of a new metric
    rewrites the file with its column.
    """

    def __init__(self, info: RunInfo) -> None:
        self._path = info.run_dir / "metrics.csv"
        self._columns = ["step", "time"]
        _start_file(self._path, info.resume_step, lambda: self._until(info.resume_step))
        if self._path.exists():
            with self._path.open(newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader(file), self._columns)
        else:
            self._rewrite([])

    def write(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        row: dict[str, Any] = {"step": step, "time": round(seconds, 3), **metrics}
        new = [key for key in row if key not in self._columns]
        if new:
            self._columns += new
            self._rewrite([*self._rows(), row])
            return
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(row)

    def close(self) -> None:
        """Do nothing: no file is open between writes."""

    def _rows(self) -> list[dict[str, Any]]:
        with self._path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def _until(self, step: int | None) -> Iterator[str]:
        """Yield the header and the lines up to a step."""
        header, *lines = self._path.read_text(encoding="utf-8").splitlines(
            keepends=True
        )
        yield header
        for line in lines:
            first_cell = line.split(",")[0]
            # The last line may be incomplete if the run was killed.
            is_whole = line.endswith("\n") and first_cell.isdigit()
            if is_whole and int(first_cell) <= (step or 0):
                yield line

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        part = self._path.with_name(self._path.name + ".part")
        with part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(part, self._path)


class TensorBoard:
    """Backend of event files in `tensorboard/`. A resumed run hides events after the resumed step."""

    def __init__(self, info: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if info.resume_step is None else info.resume_step + 1
        # The queue must hold all metrics of a step, so that only `write` flushes it.
        self._writer = SummaryWriter(
            str(info.run_dir / "tensorboard"), purge_step=purge, max_queue=1000
        )

    def write(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step, walltime=seconds)
        self._writer.flush()

    def write_samples(self, step: int, split: str, samples: Samples) -> None:
        self._writer.add_text(f"samples/{split}", markdown_table(samples), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases. WANDB_MODE, WANDB_API_KEY and `wandb login` decide whether and where to send.

    Without a login it works offline, in the run's folder; `wandb sync` sends the data
    later. A resumed run continues its own Weights & Biases run, whose id is in
    `wandb_run_id`; a fresh run gets a new id.
    """

    def __init__(self, info: RunInfo) -> None:
        wandb = self._wandb = importlib.import_module("wandb")
        options = {}
        if "WANDB_MODE" not in os.environ:
            # Newer versions of wandb can be told not to prompt for a login.
            can_be_silent = "prompt" in inspect.signature(wandb.login).parameters
            has_login = (
                wandb.login(prompt=False) if can_be_silent else wandb.api.api_key
            )
            # Without a login, wandb would ask on a terminal that a rank does not have.
            if not has_login:
                options["mode"] = "offline"
        self._run = wandb.init(
            project=info.project,
            name=info.name,
            id=_kept_id(info, "wandb_run_id"),
            resume="allow",
            dir=str(info.run_dir),
            config=dict(info.config),
            **options,
        )
        Path(info.run_dir, "wandb_run_id").write_text(self._run.id)

    def write(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def write_samples(self, step: int, split: str, samples: Samples) -> None:
        names = column_names(samples)
        rows = [[cell(sample.get(name)) for name in names] for sample in samples]
        table = self._wandb.Table(columns=names, data=rows)
        self._run.log({f"samples/{split}": table}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow. MLFLOW_TRACKING_URI names the server; without it, metrics go to
    `mlflow.db` (or `mlruns`) in the run's folder.

    A resumed run continues its MLflow run, whose id is in `mlflow_run_id`.
    """

    def __init__(self, info: RunInfo) -> None:
        self._mlflow = importlib.import_module("mlflow")
        folder = info.run_dir.resolve()
        if "MLFLOW_TRACKING_URI" not in os.environ:
            has_database = importlib.util.find_spec("sqlalchemy") is not None
            # mlflow-skinny has no database, and version 3.17 refuses file stores unless
            # this variable is set.
            if not has_database:
                os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            address = (
                f"sqlite:///{folder / 'mlflow.db'}"
                if has_database
                else f"file:{folder / 'mlruns'}"
            )
            self._mlflow.set_tracking_uri(address)
            # By default MLflow would put an experiment's files into the working folder.
            if self._mlflow.get_experiment_by_name(info.project) is None:
                self._mlflow.create_experiment(
                    info.project, (folder / "mlruns").as_uri()
                )
        self._mlflow.set_experiment(info.project)
        known_id = _kept_id(info, "mlflow_run_id")
        if known_id:
            self._mlflow.start_run(run_id=known_id)
        else:
            self._mlflow.start_run(run_name=info.name)
        Path(folder, "mlflow_run_id").write_text(self._mlflow.active_run().info.run_id)
        if not known_id:
            self._mlflow.log_dict(dict(info.config), "config.json")

    def write(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        # MLflow allows fewer characters in names: pass@1 becomes pass_1.
        named = {
            re.sub(r"[^\w./ :-]", "_", name): value for name, value in metrics.items()
        }
        self._mlflow.log_metrics(named, step=step)

    def write_samples(self, step: int, split: str, samples: Samples) -> None:
        columns = {
            name: [cell(sample.get(name)) for sample in samples]
            for name in column_names(samples)
        }
        self._mlflow.log_table(
            {"step": [step] * len(samples), **columns}, f"samples_{split}.json"
        )

    def close(self) -> None:
        self._mlflow.end_run()


def _kept_id(info: RunInfo, name: str) -> str | None:
    """Return the service's id of the run that this one continues; None for a fresh run."""
    file = Path(info.run_dir, name)
    # A fresh run in a used folder is another run for the service too.
    if info.resume_step is None or not file.is_file():
        return None
    return file.read_text().strip()


class SwanLab:
    """SwanLab.

    SWANLAB_MODE, SWANLAB_API_KEY and `swanlab login` decide where to send; without a
    key it works offline.
    """

    def __init__(self, info: RunInfo) -> None:
        self._swanlab = importlib.import_module("swanlab")
        options = {
            "project": info.project,
            "config": dict(info.config),
            "name": info.name,
        }
        options["log_dir"] = str(info.run_dir / "swanlog")
        if not {"SWANLAB_MODE", "SWANLAB_API_KEY"} & os.environ.keys():
            options["mode"] = "offline"
        self._swanlab.init(**options)

    def write(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def close(self) -> None:
        self._swanlab.finish()


class Trackio:
    """Trackio.

    TRACKIO_SPACE_ID and TRACKIO_SERVER_URL decide where to send; without them, what is
    logged stays in the run's folder (`TRACKIO_DIR=FOLDER trackio show`).
    """

    def __init__(self, info: RunInfo) -> None:
        # It is read when the library is imported.
        os.environ.setdefault("TRACKIO_DIR", str((info.run_dir / "trackio").resolve()))
        trackio = importlib.import_module("trackio")
        self._run = trackio.init(
            info.project,
            name=info.name,
            config=dict(info.config),
            resume="never" if info.resume_step is None else "allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


# Name in the configuration -> (factory, module that must be importable).
BACKENDS: dict[str, tuple[Callable[[RunInfo], Backend], str | None]] = {
    "jsonl": (JsonLines, None),
    "csv": (Csv, None),
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (Wandb, "wandb"),
    "mlflow": (MLflow, "mlflow"),
    "swanlab": (SwanLab, "swanlab"),
    "trackio": (Trackio, "trackio"),
}
# These backends only write local files, so they are written directly. Each of the
# others has a thread.
LOCAL = ("jsonl", "csv", "tensorboard")


def check_backends(
    names: tuple[str, ...] | list[str], key: str = "run.log_with"
) -> None:
    """Raise one ConfigError that lists every backend that is unknown or not installed. No backend is imported."""
    mistakes = []
    for name in names:
        if ":" in name:
            # A tracker of the user is checked when it is loaded.
            continue
        if name not in BACKENDS:
            mistakes.append(
                f"{key}: unknown tracker {name!r}; there are {', '.join(BACKENDS)}"
            )
        elif missing_module(name) is not None:
            mistakes.append(f"{key}: {how_to_install(name)}")
    if mistakes:
        raise ConfigError("\n".join(mistakes))


def make_backend(name: str, info: RunInfo) -> Backend:
    """Create a tracker from its name, or from a user's class given as module:object or file.py:object.

    Raises:
        ConfigError: there is no tracker of this name.
        Exception: anything that the tracker's library raises.
    """
    if ":" in name:
        from megaverl.plugins import call_object

        backend: Backend = call_object(name, "run.log_with", info)
        return backend
    check_installed(name)
    return BACKENDS[name][0](info)


def check_installed(name: str) -> None:
    """Raise a ConfigError if there is no such tracker, or its package is missing."""
    if ":" in name:
        return
    if name not in BACKENDS:
        raise ConfigError(
            f"unknown tracker {name!r}; there are {', '.join(BACKENDS)}, or module:object"
        )
    if missing_module(name) is not None:
        raise ConfigError(how_to_install(name))


def missing_module(name: str) -> str | None:
    """Return the missing module that a known backend needs; None if the backend can be used."""
    _, module = BACKENDS[name]
    if module is None or importlib.util.find_spec(module) is not None:
        return None
    return module


def how_to_install(name: str) -> str:
    """Return the error text for a backend whose package is missing."""
    return f"the tracker {name!r} is not installed: pip install 'megaverl[{name}]', or leave it out"


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, float]]:
    """Read the records of a metrics.jsonl, with numbers as floats. An incomplete last line is left out."""
    records = []
    for line in Path(path).read_text(encoding="utf-8").splitlines(keepends=True):
        # A run that is still writing, or was killed, may leave the last line
        # incomplete.
        if not line.endswith("\n"):
            continue
        record = read_json(line, not_finite=True)
        records.append({key: float(value) for key, value in record.items()})
    return records


def _json_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _json_lines_until(path: Path, step: int | None) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n") and read_json(line, not_finite=True)["step"] <= (
            step or 0
        ):
            yield line


def _start_file(
    path: Path, resume_step: int | None, kept: Callable[[], Iterator[str]]
) -> None:
    """Cut an existing file to the records that a resumed run keeps, or rename it for a fresh run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.stat().st_size == 0:
        return
    if resume_step is None:
        number = 1
        while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
            number += 1
        os.replace(path, aside)
        return
    part = path.with_name(path.name + ".part")
    part.write_text("".join(kept()), encoding="utf-8")
    os.replace(part, path)


Samples = Sequence[Mapping[str, Any]]


def column_names(samples: Samples) -> list[str]:
    """List the names that occur in any of the samples."""
    return list(dict.fromkeys(name for sample in samples for name in sample))


def cell(value: Any) -> Any:
    """Return a value for a table: numbers and text unchanged, everything else as JSON."""
    if value is None or isinstance(value, str | int | float):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def markdown_table(samples: Samples) -> str:
    """Format samples as a Markdown table. Text of a model is shown as code, so that it is not interpreted."""
    names = column_names(samples)
    rows = [names, ["---"] * len(names)]
    for sample in samples:
        rows.append([_code(sample.get(name)) for name in names])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _code(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int | float):
        return f"{value}"
    # A vertical bar or a line break would end the cell.
    text = html.escape(str(cell(value))).replace("|", "&#124;").replace("\n", "<br>")
    return f"<code>{text}</code>"


class Backend(Protocol):
    """Destination of metrics. `write` may raise anything; the tracker then stops using this backend.

    A backend with `write_samples(step, split, samples)` gets samples too. `split` is
    train or validation, and each sample is a mapping with keys such as prompt,
    response, reference, reward.
    """

    def write(
        self, step: int, seconds: float, metrics: Mapping[str, float]
    ) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class RunInfo:
    """Facts about the run that backends need."""

    run_dir: Path
    name: str
    project: str
    config: Mapping[str, Any]
    resume_step: int | None  # the step that the run resumes from; None for a fresh run
