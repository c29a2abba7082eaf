"""Every code block of the documents does what it says, every link leads somewhere, every made page is current.

What a block is decides what is done with it:
- python: run, page by page, in one namespace. One with a title is also that file.
- yaml: loaded and checked as a configuration (missing parts are filled in), and planned: it fits H100s. A
  comment before it names the model and the nodes (<!-- planned: --nodes 1 --model-config FILE -->); without one it is a
  small model on as few ranks as the grids need. `--config FILE` names a recipe that it is laid over, `--hosts A,B` the
  nodes that it places roles on, and key=value what else the run has. One with a title is also that file.
- json: parsed, line by line.
- bash: each line is run; what would train or convert is checked up to where it would begin (`--dry-run`), a script must
  be there and take its options, and what changes a machine (pip, apt) or needs several is only looked at.
A block that cannot be run at all says why in a comment before it: <!-- not run: reason
-->
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from megaverl import errors
from megaverl.cli.main import COMMANDS, main, parser_of
from megaverl.config import load_config, smallest_world
from megaverl.config.key_types import type_at
from megaverl.config.loader import FLAT
from megaverl.config.passthrough import PLACES
from megaverl.config.schema import Config
from megaverl.config.section import all_keys, keys_of
from megaverl.config.typed_yaml import compose, construct
from megaverl.distributed.placement import Node
from megaverl.planner.advice import shortages
from megaverl.planner.job import Machine, find_spec, make_job
from megaverl.planner.memory import MemoryModel
from megaverl.planner.placed_run import by_ranks, derive_share, with_share
from megaverl.rewards import registry
from megaverl.trainer.elastic_agent import PASSED_ON
from megaverl.trainer.job import place
from tests.docs.pages import (
    PAGES,
    ROOT,
    Block,
    anchors,
    blocks,
    links,
    table_column,
    table_names,
)
from tests.trainer.conftest import make_inputs
from tools.bench_report import make_run
from tools.write_docs import outdated

BASE: dict[str, Any] = {
    "model": {"path": "models/small"},
    "data": {"train": "train.jsonl"},
    "reward": "exact_match",
}
GROUPS = {"group_size": 4}  # what most recipes have
DRY = ("train", "sft", "eval", "generate", "quickstart", "dpo", "reward")
ONLY_LOOKED_AT = (
    "cp",
    "pip",
    "apt-get",
    "sbatch",
    "cd",
    "source",
    "export",
    "make",
    "mkdocs",
    "tensorboard",
    "docker",
    "git",
)
NOT_A_CONFIG = ("mkdocs",)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with what the documents speak of, and the shell in it."""
    folder = tmp_path_factory.mktemp("desk")
    make_inputs(folder)
    (folder / "models").mkdir()
    shutil.move(folder / "model", folder / "models" / "small")
    for name in ("a", "quickstart", "mine", "before", "after", "b"):
        make_run(folder / "runs" / name, 12)
    (folder / "runs" / "quickstart" / "hf").symlink_to(folder / "models" / "small")
    (folder / "runs" / "quickstart" / "inputs").mkdir()
    for name in ("train.jsonl", "held_out.jsonl"):
        (folder / "runs" / "quickstart" / "inputs" / name).symlink_to(folder / name)
    for name in ("configs", "tools", "launch"):
        (folder / name).symlink_to(ROOT / name)
    # A context as real models have it.
    config = folder / "models" / "small" / "config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 4096})
    )
    for block in all_blocks():
        if block.title:  # what one page makes, another may speak of
            (folder / block.title).write_text(block.text)
    before, path = Path.cwd(), list(sys.path)
    os.chdir(folder)
    os.environ["ALERT_URL"] = "https://hooks.example.org/1"
    yield folder
    del os.environ["ALERT_URL"]
    sys.path[:] = path  # the plug-ins' loader has put the folder there
    os.chdir(before)


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]


def test_a_block_that_is_not_run_has_a_reason() -> None:
    assert [
        str(block)
        for block in all_blocks()
        if block.not_run and len(block.not_run) < 10
    ] == []
    spoken = {"bash", "python", "yaml", "json", "text", "", "console", "mermaid"}
    assert {block.language for block in all_blocks()} <= spoken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_do_what_they_say(
    page: Path, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    registry.reward_names()  # the built-in ones stay
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    namespace: dict[str, Any] = {"__name__": "documents"}
    for block in blocks(page):
        if block.not_run:
            continue
        run = {
            "python": run_python,
            "yaml": run_yaml,
            "json": run_json,
            "bash": run_bash,
        }.get(block.language)
        if run is not None:
            run(block, namespace)


def run_python(block: Block, namespace: dict[str, Any]) -> None:
    exec(compile(block.text, block.title or str(block), "exec"), namespace)


def run_json(block: Block, namespace: dict[str, Any]) -> None:
    for line in block.text.splitlines():
        json.loads(line)


def run_yaml(block: Block, namespace: dict[str, Any]) -> None:
    """A configuration, or a part of one."""
    node = compose(block.text)
    assert node is not None, f"{block}: empty"
    values = construct(node, type_at)
    values.pop("base", None)  # the command below it loads both
    options = plan_options(block)
    known = {*keys_of(Config), *(name.partition(".")[0] for name in FLAT)}
    assert isinstance(values, dict) and set(values) <= known, (
        f"{block}: not a configuration"
    )
    complete = {
        **BASE,
        **values,
        "algorithm": {**GROUPS, **values.get("algorithm", {})},
    }
    for section in ("model", "data"):
        given = values.get(section, {})
        complete[section] = given if any(name.startswith(f"{section}.{key}") for name in FLAT for key in given) else {
            **BASE[section], **given
        }  # fmt: skip
    if values.get("reward") is None and "reward_function" in values.get("model", {}):
        del complete["reward"]
    command = "eval" if block.title == "eval.yaml" else "train"
    if options.config:
        overrides = [f"{name}={json.dumps(value)}" for name, value in values.items()]
        base: Any = options.config
    else:
        base, overrides = complete, []
    config = load_config(
        base, [*overrides, *options.settings], command=command, check_paths=False
    )
    if command == "train" and ".py:" not in config.rollout.engine:
        plan_yaml(block, config, options)


def plan_options(block: Block) -> argparse.Namespace:
    """Return the options in the comment before a configuration."""
    options = argparse.ArgumentParser()
    options.add_argument("--nodes", type=int, default=0)
    options.add_argument("--hosts", default="")
    options.add_argument("--config", type=Path)
    options.add_argument("--model-config", default="models/small/config.json")
    options.add_argument("settings", nargs="*")
    return options.parse_args(shlex.split(block.planned))


def plan_yaml(block: Block, config: Config, given: argparse.Namespace) -> None:
    """A run of it fits, as `megaverl plan` counts."""
    machine = Machine()
    hosts = given.hosts.split(",") if given.hosts else []
    world = (
        (given.nodes or len(hosts)) * machine.gpus_per_node
        or config.run.nproc
        or smallest_world(config)
    )
    if hosts:
        nodes = tuple(Node(host, machine.gpus_per_node) for host in hosts)
        config = by_ranks(config, place(config, "train", world, nodes))
    job = make_job(config, find_spec(config, given.model_config), world, machine)
    share = derive_share(job)
    job = job if share is None else with_share(job, share)
    missing = shortages(job, MemoryModel(job).ranks(job.stage_ranks()))
    assert [str(each) for each in missing] == [], f"{block} does not fit {world} GPUs"


def run_bash(block: Block, namespace: dict[str, Any]) -> None:
    for line in commands(block.text):
        run_command(block, line)


def commands(text: str) -> list[str]:
    """The lines of a shell block, continued ones joined, without comments."""
    joined = re.sub(r"\\\n\s*", " ", text)
    return [
        line.strip()
        for line in joined.splitlines()
        if line.strip() and not line.strip().startswith("#")
    ]


def run_command(block: Block, line: str) -> None:
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    if ">" in words:
        words = words[: words.index(">")]
    words = [word for word in words if word not in ("...", "|")]
    program, *rest = words
    name = program.rpartition("/")[2]
    if name == "megaverl":
        run_megaverl(block, rest)
    elif program.startswith(("./launch/", "launch/")) or name.endswith(".sh"):
        path = ROOT / program
        assert path.is_file() and path.stat().st_mode & 0o111, f"{block}: {program}"
    elif name in ("python", "torchrun", "python3.11"):
        run_script(block, rest)
    elif name == "make" and shutil.which("make"):
        # Printed, not run.
        subprocess.run(
            ["make", "-n", *rest], cwd=ROOT, stdout=subprocess.DEVNULL, check=True
        )
        for path in (word.partition("=")[2] for word in rest if word.startswith("t=")):
            assert (ROOT / path).exists(), f"{block}: {path}"
    else:
        assert program in ONLY_LOOKED_AT, f"{block}: what is to be done with `{line}`?"


def run_megaverl(block: Block, words: list[str]) -> None:
    if "|" in (words[0] if words else ""):  # `megaverl sft | eval | generate --help`
        words = [words[0].partition("|")[0].strip(), "--help"]
    command = words[0]
    assert command in COMMANDS or command.startswith("--"), (
        f"{block}: no command {command}"
    )
    if "--help" in words:
        with pytest.raises(SystemExit) as left:
            main([command, "--help"])
        assert left.value.code == 0, block
        return
    if command == "convert":
        parser_of("convert").parse_args(words[1:])
        return
    if command == "doctor":
        words = [*words, "--no-trials"]
    if command in DRY and "--dry-run" not in words:
        words = [*words, "--dry-run"]
    if command in DRY and "--no-file-checks" not in words:
        words = [*words, "--no-file-checks"]
    if command in ("train", "eval") and "--config" not in words:
        words = [*words, "data.train=train.jsonl", "reward=exact_match"]
    fewer = [re.sub(r"^\d{3,}$", "16", word) for word in words]
    is_as_printed = fewer == words
    if command == "plan":  # as for 16 nodes: tests/planner plans for a thousand ranks
        words = fewer
    if "FILE" in words:
        words[words.index("FILE")] = "configs/gsm8k_smollm2/ppo.yaml"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(words)
    if command == "plan" and is_as_printed:
        assert "too much" not in printed.getvalue(), f"{block}: does not fit"
    assert code == 0 or (command == "doctor" and code == 1), (
        f"{block}: megaverl {' '.join(words)} gave {code}"
    )


def run_script(block: Block, words: list[str]) -> None:
    """A tool must be there, and know every option that it is given; a module too."""
    if "-m" in words:
        module = words[words.index("-m") + 1]
        path = ROOT / (module.replace(".", "/") + ".py")
        assert path.is_file() or not module.startswith("megaverl"), (
            f"{block}: no module {module}"
        )
        return
    script = next((word for word in words if word.endswith(".py")), None)
    if script is None:
        return
    path = ROOT / script if (ROOT / script).is_file() else Path(script)
    assert path.is_file() or "/" not in script, f"{block}: no {script}"
    if path.is_file():
        text = path.read_text()
        for option in [
            word.partition("=")[0]
            for word in words[words.index(script) + 1 :]
            if word.startswith("--")
        ]:
            assert f'"{option}"' in text, f"{block}: {script} has no {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        target, _, anchor = link.partition("#")
        if target.startswith(("http://", "https://")):
            assert re.fullmatch(r"https://[\w.-]+(/[\w./%@~+-]*)?", target), (
                f"{page.name}: {link}"
            )
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.relative_to(ROOT)}: {link} leads nowhere"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), (
                f"{page.relative_to(ROOT)}: {link}: no such heading"
            )


def test_every_page_is_in_the_site_and_what_is_in_the_site_is_there() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    named = re.findall(r"([\w/]+\.md)", text)
    assert len(named) == len(set(named)), "a page stands in the menu once"
    assert set(named) == {
        str(page.relative_to(ROOT / "docs"))
        for page in PAGES
        if page.is_relative_to(ROOT / "docs")
    }


def test_pages_made_from_the_code_are_current() -> None:
    assert [str(path.relative_to(ROOT)) for path in outdated()] == [], (
        "run: python tools/write_docs.py"
    )


def test_settings_of_others_are_translated_into_keys() -> None:
    """Every key that the page names is one that `megaverl keys` lists: in its tables' first columns and in its text."""
    page = ROOT / "docs" / "coming_from.md"
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    in_text = {
        span.partition(":")[0]
        for span in re.findall(r"`([^`\n]+)`", prose)
        if re.match(r"[a-z_]{2,}\.[a-z_.]+", span)
    }
    in_text -= {name for name in in_text if name.endswith((".py", ".md", ".yaml"))}
    settings = table_names(page, "Settings")
    functions = {name for name in settings if name in {"dual_clip", "clip_dual"}}
    named = settings - functions | table_names(page, "Other defaults") | in_text
    assert (
        len(named) > 60
        and len(in_text) > 5
        and {each for each in named if not is_key(each)} == set()
    )


def is_key(name: str) -> bool:
    """Return whether this is a key, a section, or a field of another library's class under one."""
    keys = {re.sub(r"\.N\..*", "", each) for each in all_keys(Config)}
    place = next((place for place in PLACES if name.startswith(f"{place}.")), None)
    if place is not None:
        return (
            name.removeprefix(f"{place}.").partition(".")[0] in PLACES[place].settable()
        )
    return name in keys or any(key.startswith(f"{name}.") for key in keys)


def test_flat_names_and_variables_are_those_of_the_code() -> None:
    assert table_names(ROOT / "docs" / "reference.md", "Flat names") == set(FLAT)
    sources = [*(ROOT / "megaverl").rglob("*.py"), *(ROOT / "launch").rglob("*.sh")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    # The scripts' own.
    used = set(re.findall(r"\bMEGAVERL_[A-Z_]+", text)) - {"MEGAVERL_ROOT"}
    documented = table_names(
        ROOT / "docs" / "reference.md", "Variables of the environment"
    )
    assert used == {name for name in documented if name.startswith("MEGAVERL_")}
    named = re.findall(
        r'Variable\(\s*"(\w+)"', (ROOT / "megaverl" / "rank_environment.py").read_text()
    )
    assert len(named) > 5 and set(named) <= documented


def code_strings() -> Iterator[str]:
    """Every string of the package; `*` for what is filled into one."""
    for path in sorted((ROOT / "megaverl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(each.value) if isinstance(each, ast.Constant) else "*"
                    for each in node.values
                )


def test_every_metric_is_on_its_page_and_those_of_the_page_are_in_the_code() -> None:
    """Whole names as the code writes them, and those that losses give to what is put before them (`actor/`, `dpo/`)."""
    documented = table_names(ROOT / "docs" / "reference.md", "Every metric")
    exact = {
        name
        for name in documented
        if "/" in name and not re.search(r"^[\w*]+/\*$", name)
    } | {
        "reward/*",
        "busy/*",
    }
    families = "|".join(
        {name.partition("/")[0] for name in exact if not name.startswith("mix")}
    )
    strings = set(code_strings())
    written = {
        text
        for text in strings
        if re.fullmatch(rf"(?:{families})/[\w/@*]*[a-z][\w/@*]*", text)
    }
    assert {
        name for name in written if not any(fnmatch(name, line) for line in exact)
    } == set()
    parts = set()  # what a loss or a role reports, before a name stands before it
    for path in (ROOT / "megaverl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                parts |= {
                    ast.literal_eval(k)
                    for k, v in pairs
                    if k and ast.unparse(v).startswith("moments(")
                }
            elif (
                isinstance(node, ast.Subscript) and ast.unparse(node.value) == "metrics"
            ):
                stored = isinstance(node.ctx, ast.Store) and isinstance(
                    node.slice, ast.Constant
                )
                parts |= {ast.literal_eval(node.slice)} if stored else set()
    last = {name.rpartition("/")[2] for name in exact}
    assert len(parts) > 30 and {name for name in parts if "/" not in name} <= last
    for name in exact - {"reward/*", "busy/*"}:
        end = name.rpartition("/")[2]
        spelled = {
            name,
            name.partition("/")[2],
            end,
            f"*/{end}",
            end.removeprefix("service_"),
        }
        assert spelled & strings or any(fnmatch(each, name) for each in written), (
            f"{name} is written by nothing"
        )


def test_every_exit_code_is_on_its_page() -> None:
    documented = {
        int(code)
        for cell in table_column(ROOT / "docs" / "reference.md", "Exit codes")
        for code in cell.split(",")
    }
    named = {value for name, value in vars(errors).items() if name.isupper()}
    assert documented == {0, *named, *(128 + number for number in PASSED_ON)}
    literal = set()
    for path in (ROOT / "megaverl").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in (
                "sys.exit",
                "os._exit",
                "SystemExit",
            ):
                literal |= {
                    each.value for each in call.args if isinstance(each, ast.Constant)
                }
    assert {code for code in literal if isinstance(code, int)} <= documented
