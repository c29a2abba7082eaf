"""Checks of what a run needs on this machine: the model's folder, data files, checkpoints, packages, a run folder."""

from __future__ import annotations

import glob
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from megaverl.config.errors import ConfigIssue
from megaverl.config.evaluation import (
    HARNESS_MODULES,
    SUITE_PREFIX,
    HarnessTask,
    parse_suite_source,
)
from megaverl.config.grids import used_roles
from megaverl.config.run import RESUME_WORDS, is_hub_name
from megaverl.config.schema import Config
from megaverl.config.section import Issues
from megaverl.config.signatures import source_file
from megaverl.config.wording import listed, yaml_text
from megaverl.errors import ModelError
from megaverl.rewards.reasoning_gym import PREFIX, why_no_task
from megaverl.rollout.environments import harbor, nemo_gym, verifiers
from megaverl.sharding.model_spec import ModelSpec

DATA_SUFFIXES = (".jsonl", ".parquet")


def read_model(
    config: Config, command: str
) -> tuple[ModelSpec | None, list[ConfigIssue]]:
    """Read the model's sizes from its folder.

    Returns None for a model on a hub or one that cannot be read, with the mistakes.
    """
    # A name on the hub is checked after its files have been downloaded.
    if not config.model.path or is_hub_name(config.model.path):
        return None, []
    if not Path(config.model.path).is_dir():
        kind = (
            "a file"
            if Path(config.model.path).exists()
            else "neither a folder nor a model on a hub (org/name)"
        )
        return None, [
            ConfigIssue(
                "model.path", f"found {yaml_text(config.model.path)}, which is {kind}."
            )
        ]
    roles = [
        role for role in used_roles(config, command) if getattr(config, role, None)
    ] or ["actor"]
    on_megatron = [role for role in roles if getattr(config, role).engine == "megatron"]
    try:
        # A Megatron role needs an architecture with conversion tables; other engines
        # need only the sizes.
        read = ModelSpec.from_folder if on_megatron else ModelSpec.outline
        return read(config.model.path), []
    except ModelError as error:
        return None, [ConfigIssue("model.path", str(error))]


def file_issues(config: Config, command: str) -> Issues:
    """Yield data files, model folders, tokenizers and checkpoints that do not exist."""
    wanted = {
        "data.train": config.data.train,
        "data.validation": config.data.validation,
    }
    if command in ("sft", "quickstart"):
        wanted["sft.train"] = config.sft.train
    if command == "eval":
        del wanted["data.train"]
        yield from _suite_issues(config)
    if command in ("eval", "train", "quickstart"):
        yield from _task_issues(config)
    if command in ("generate", "tinker"):
        wanted = {}
    for key, paths in wanted.items():
        for index, source in enumerate(paths):
            if problem := source_problem(source.path):
                yield ConfigIssue(
                    f"{key}.{index}", f"found {yaml_text(source.path)}, {problem}"
                )
    models = {
        role: getattr(config, role).path
        for role in ("critic", "reference", "reward_model")
    }
    models |= {
        f"reward.{index}": entry.path for index, entry in enumerate(config.reward)
    }
    for key, folder in models.items():
        if (
            folder is not None
            and not is_hub_name(folder)
            and not (Path(folder) / "config.json").is_file()
        ):
            text = f"found {yaml_text(folder)}, which is not a Hugging Face folder with config.json."
            yield ConfigIssue(f"{key}.path", text)
    for role in ("actor", "critic"):
        lora = getattr(config, role).lora
        if (
            lora is not None
            and lora.path is not None
            and not (Path(lora.path) / "adapter_config.json").is_file()
        ):
            yield ConfigIssue(
                f"{role}.lora.path",
                f"found {yaml_text(lora.path)}, which has no adapter_config.json of peft.",
            )
    for key, tokenizer in (
        ("model", config.model.tokenizer),
        ("reference", config.reference.tokenizer),
    ):
        if (
            tokenizer is not None
            and not Path(tokenizer).exists()
            and not is_hub_name(tokenizer)
        ):
            yield ConfigIssue(
                f"{key}.tokenizer",
                f"found {yaml_text(tokenizer)}, which does not exist.",
            )
    resume = config.checkpoint.resume
    if resume not in RESUME_WORDS and not Path(resume).is_dir():
        kind = ", which is a file" if Path(resume).exists() else ""
        yield ConfigIssue(
            "checkpoint.resume",
            f"found {yaml_text(resume)}{kind}; allowed: {listed(RESUME_WORDS)}, or the folder of a checkpoint.",
        )
    replay = config.trainer.replay_rollouts
    if replay is not None and not Path(replay).is_dir():
        yield ConfigIssue(
            "trainer.replay_rollouts",
            f"found {yaml_text(replay)}, which is not a folder of stored rollouts.",
        )


def _suite_issues(config: Config) -> Issues:
    """Yield suites whose rows or rewards cannot be used."""
    evaluation = config.evaluation
    for suite in evaluation.suites:
        if problem := suite_problem(evaluation.source(suite, config.run.seed)):
            yield ConfigIssue(f"evaluation.data.{suite}", problem)


def _task_issues(config: Config) -> Issues:
    """Yield tasks of other harnesses whose file or package does not exist."""
    evaluation = config.evaluation
    python = evaluation.harness_python
    if python is not None and shutil.which(python) is None:
        yield ConfigIssue(
            "evaluation.harness_python",
            f"found {yaml_text(python)}, which is no program.",
        )
    for index, text in enumerate(evaluation.tasks):
        try:
            task = HarnessTask.parse(text)
        except ValueError:
            # The rule of the section reports it.
            continue
        if task.source is not None and not Path(task.source).is_file():
            yield ConfigIssue(
                f"evaluation.tasks.{index}",
                f"found {yaml_text(text)}, and {task.source} does not exist.",
            )
        module = HARNESS_MODULES[task.harness]
        # Another interpreter's packages are not known here. Its process reports what it
        # lacks.
        if python is None and find_spec(module) is None:
            yield ConfigIssue(
                f"evaluation.tasks.{index}",
                f"found {yaml_text(text)}, and the package {module} is not installed: "
                f"pip install 'megaverl[{task.harness}]'. Or name an interpreter that has it in "
                "evaluation.harness_python.",
            )


def suite_problem(path: str) -> str:
    """Return what is wrong with a source `suite:NAME?path=...`, or "".

    A suite without rows on this machine is on a hub, which only the package datasets
    reads.
    """
    try:
        source = parse_suite_source(path)
    except ValueError as error:
        return f"{error}."
    if Path(source.path).suffix == ".csv":
        missing = "" if Path(source.path).is_file() else "which does not exist."
        return f"found {yaml_text(source.path)}, {missing}" if missing else ""
    problem = source_problem(source.path)
    return f"found {yaml_text(source.path)}, {problem}" if problem else ""


def run_folder_issues(config: Config) -> Issues:
    """Yield a mistake if the run folder cannot be created, judged by its nearest existing parent."""
    nearest = next(
        path
        for path in (config.run_dir, *config.run_dir.absolute().parents)
        if path.exists()
    )
    if not nearest.is_dir():
        yield ConfigIssue(
            "run.dir",
            f"found {yaml_text(config.run.dir)}, but {nearest} is a file. Name another folder.",
        )
        return
    # Create something for real: os.access returns true for root everywhere, /proc
    # included.
    try:
        with tempfile.TemporaryDirectory(prefix=".megaverl-", dir=nearest):
            pass
    except OSError as error:
        reason = error.strerror or type(error).__name__
        text = (
            f"found {yaml_text(config.run.dir)}, but nothing can be made in {nearest} ({reason}). Name "
            "another folder."
        )
        yield ConfigIssue("run.dir", text)


def package_issues(config: Config, command: str) -> Issues:
    """Yield a mistake for each package that the run needs and that is not installed."""
    generates = (
        command in ("train", "eval", "generate", "quickstart", "tinker")
        and config.trainer.replay_rollouts is None
    )
    if generates and config.rollout.engine == "vllm" and find_spec("vllm") is None:
        yield ConfigIssue(
            "rollout.engine",
            "is vllm, which is not installed here: pip install 'megaverl[vllm]' (without a GPU 'megaverl[cpu]'), "
            "or rollout.engine=hf.",
        )
    # `find_spec` of a dotted name would import the parent package.
    if find_spec("megatron") is None or source_file("megatron.core") is None:
        yield ConfigIssue(
            "actor",
            "is trained by megatron-core, which is not installed here: pip install 'megaverl[megatron]'.",
        )


def source_problem(path: str) -> str:
    """Return what is wrong with one data source, or "". The accepted forms are those of `megaverl.data.sources`."""
    if Path(path).is_dir():
        return ""
    if path.startswith(PREFIX):
        return why_no_task(path)
    if path.startswith(SUITE_PREFIX):
        return suite_problem(path)
    if path.startswith(verifiers.PREFIX):
        return verifiers.why_no_taskset(path)
    if path.startswith(harbor.PREFIX):
        return harbor.why_no_tasks(path)
    if path.startswith(nemo_gym.PREFIX):
        return nemo_gym.why_no_rows(path)
    if ":" in path and not Path(path).exists():
        file = Path(path.rpartition(":")[0])
        return (
            "whose file is not there."
            if file.suffix == ".py" and not file.is_file()
            else ""
        )
    if (
        is_hub_name(path)
        and Path(path).suffix not in DATA_SUFFIXES
        and not glob.has_magic(path)
    ):
        return (
            ""
            if find_spec("datasets")
            else "a data set on the hub: pip install 'megaverl[datasets]'."
        )
    return _file_problem(Path(path))


def _file_problem(path: Path) -> str:
    """Return what is wrong with a data file or a pattern of files, or ""."""
    # `megaverl.data` accepts patterns, too.
    if glob.has_magic(str(path)):
        return "" if glob.glob(str(path)) else "a pattern that no file matches."
    if path.suffix not in DATA_SUFFIXES:
        return f"whose suffix is not one of {listed(DATA_SUFFIXES)}."
    if not path.is_file():
        return (
            f"which does not exist (relative to {Path.cwd()})."
            if not path.is_absolute()
            else "which does not exist."
        )
    return "which is an empty file." if path.stat().st_size == 0 else ""
