"""Share of small faults in the core that its nearest tests notice: mutants made by cosmic-ray, in a copy of the tree.

    pip install --target DIR cosmic-ray                        # apart from .venv, whose versions are pinned
    python tools/mutation_score.py --cosmic-ray DIR             # 300 mutants out of all, by seed
    python tools/mutation_score.py --cosmic-ray DIR --num 60 --only 'sharding/*' --jobs 2

A mutant is one module with one small change: another comparison, a number one off, a loop that never runs. Places are
drawn evenly over the modules of TARGETS, and one change at each place. The tests run with everything large imported
already, in a fork for each mutant. Neither the working tree nor an installed package is ever changed, so that an
interruption leaves nothing behind. Annotations are left out: nothing reads them.

The exit code is 0 whatever the score, and 1 where tests fail without any mutation.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import importlib
import multiprocessing
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

ROOT = Path(__file__).resolve().parents[1]
MISSING = "cosmic-ray is missing. Run: pip install --target DIR cosmic-ray, and give --cosmic-ray DIR."
IMPORTED = (
    "numpy",
    "torch",
    "hypothesis",
    "pytest",
    "pydantic",
    "omegaconf",
    "pyarrow.parquet",
    "safetensors.numpy",
)
NOT_COPIED = (
    ".git",
    ".venv",
    "runs",
    "shared",
    "build",
    "*.egg-info",
    ".hypothesis",
    ".*_cache",
)
ENVIRONMENT = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
SECONDS = 15.0  # that tests may take, beside twice what they take unchanged
# Not drawn: of the small numbers, names and enumerations that stand here, what is equal
# is also the same object.
SAME = ("Eq_Is", "Is_Eq", "NotEq_IsNot", "IsNot_NotEq")
SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36  # of prctl


@dataclass(frozen=True)
class Target:
    """Modules, as patterns under megaverl/, and the narrowest tests of them, as pytest takes them."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


LAYOUT_TESTS = (
    "tests/sharding",
    "tests/weights/test_plan.py",
    # these start vLLM and FSDP2: minutes
    "--deselect=tests/sharding/test_vllm.py::test_vllm_itself_places_the_elements_there",
    "--deselect=tests/sharding/test_layout.py::test_fsdp2_itself_holds_these_elements",
)
TARGETS = (
    Target(
        ("sharding/boxes.py", "sharding/layout.py", "sharding/megatron.py"),
        (*LAYOUT_TESTS, "tests/sharding/test_dist_checkpoint.py"),
    ),
    Target(
        ("sharding/vllm.py", "sharding/weight.py"),
        (*LAYOUT_TESTS, "tests/models/test_architectures.py"),
    ),
    Target(("models/lora/low_rank.py",), ("tests/models/test_low_rank.py",)),
    Target(
        ("weights/stored.py",),
        ("tests/weights/test_load.py", "tests/models/test_architectures.py"),
    ),
    Target(
        tuple(f"sharding/{name}.py" for name in ("plan", "load_balance", "proof")),
        (
            "tests/sharding/test_load_balance.py",
            "tests/weights/test_check.py",
            "tests/weights/test_plan.py",
        ),
    ),
    Target(("data/batching.py",), ("tests/data/test_batching.py",)),
    Target(("data/datasets.py",), ("tests/data/test_datasets.py",)),
    Target(("data/prefix_packing.py",), ("tests/data/test_prefix_packing.py",)),
    Target(("models/packing.py",), ("tests/models/test_packing.py",)),
    Target(("workers/decisions.py",), ("tests/workers/test_decisions.py",)),
    Target(
        ("distributed/placement.py", "distributed/placement_resolver.py"),
        (
            "tests/distributed/test_placement.py",
            "tests/distributed/test_placement_edges.py",
            "tests/planner/test_placed.py",
        ),
    ),
    Target(
        (
            "checkpoint/commit.py",
            "checkpoint/manifest.py",
            "checkpoint/checksummed_files.py",
        ),
        ("tests/checkpoint/test_files.py", "tests/checkpoint/test_commit.py"),
    ),
    Target(
        ("rollout/environments/tool_worker.py", "rollout/environments/tools.py"),
        (
            "tests/rollout/environments/test_tool_worker.py",
            "tests/rollout/environments/test_tools.py",
        ),
    ),
    Target(
        ("rewards/line_process.py", "rewards/math_worker.py"),
        ("tests/rewards/test_line_process.py", "tests/rewards/test_built_in.py"),
    ),
)


@dataclass(frozen=True)
class Mutant:
    """A module's path in the tree, its changed source, and the place and description of the change."""

    path: str
    source: str
    line: int
    change: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.change}"


def list_mutants(
    package: Path, targets: Sequence[Target], num: int, seed: int, only: str = "*"
) -> list[Mutant]:
    """Return `num` mutants, or one for every place if there are fewer places; a seed draws the same ones again."""
    from cosmic_ray.mutating import mutate_code

    places = [
        (path, target.tests, line, changes)
        for target in targets
        for pattern in target.modules
        for path in sorted(package.glob(pattern))
        if path.relative_to(package).match(only)
        for line, changes in _places(path.read_text(encoding="utf-8"))
    ]
    draw = random.Random(seed)
    draw.shuffle(places)
    mutants: list[Mutant] = []
    for path, tests, line, changes in places:
        if len(mutants) == num:
            break
        operator, occurrence = draw.choice(changes)
        before = path.read_text(encoding="utf-8")
        try:
            source = mutate_code(before, operator, occurrence)
        except AttributeError:  # cosmic-ray 8.7 knows no dotted name in an `except`
            continue
        if source is not None and _compiles(source) and source != before:
            change = _change(before, source, line)
            mutants.append(
                Mutant(
                    str(path.relative_to(package.parent)), source, line, change, tests
                )
            )
    return mutants


def _places(source: str) -> Iterator[tuple[int, list[tuple[Any, int]]]]:
    """Yield for each changeable place its line and (operator of cosmic-ray, occurrence number) pairs, in order."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.operators.provider import OperatorProvider

    provider, unread = OperatorProvider(), list(_unread(ast.parse(source)))
    nodes = list(ast_nodes(get_ast(source)))
    changes: dict[Any, list[tuple[Any, int]]] = {}
    for name in provider:
        if (
            provider[name].arguments()
            or name.removeprefix("ReplaceComparisonOperator_") in SAME
        ):
            continue
        operator, occurrence = provider[name](), 0
        for node in nodes:
            for place in operator.mutation_positions(node):
                if not any(start <= place[0] < end for start, end in unread):
                    changes.setdefault(place, []).append((operator, occurrence))
                occurrence += 1
    yield from ((place[0][0], changes[place]) for place in sorted(changes))


def _unread(tree: ast.AST) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the source ranges of annotations, overloads and imports for types, which never run."""
    for node in ast.walk(tree):
        silent: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef):
            silent += [
                node.returns,
                *(
                    decorator
                    for decorator in node.decorator_list
                    if ast.unparse(decorator) == "overload"
                ),
            ]
        elif isinstance(node, ast.AnnAssign | ast.arg):
            silent += [node.annotation]
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            silent += [node]
        for annotation in silent:
            if annotation is not None:
                decorated = (
                    1
                    if isinstance(node, ast.FunctionDef)
                    and annotation is not node.returns
                    else 0
                )
                place: Any = annotation
                yield (
                    (place.lineno, place.col_offset - decorated),
                    (place.end_lineno, place.end_col_offset),
                )


def _compiles(source: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # `is` with a literal
            compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _change(before: str, after: str, line: int) -> str:
    old, new = before.splitlines(), after.splitlines()
    now = new[line - 1].strip() if len(new) == len(old) else "(without it)"
    return f"`{old[line - 1].strip()}` -> `{now}`"


class _NearestFirst:
    """Plugin of pytest that runs tests which start ranks last, and makes Hypothesis repeatable and brief."""

    def pytest_sessionstart(self) -> None:
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile(
            "mutants", settings(), database=None, derandomize=True, phases=phases
        )
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: "launch" in item.fixturenames)

    pytest_collection_modifyitems.pytest_impl = {"trylast": True}  # type: ignore[attr-defined]


def run_tests(tree: Path, tests: Sequence[str], seconds: float) -> tuple[str, float]:
    """Run tests in a fork of this process, of which nothing is left afterwards.

    Returns:
        `passed`, `failed` or `timeout`, and how long it took. What pytest printed is in `tree / "tests.log"`.
    """
    # What the tests leave behind becomes a child of this process.
    _prctl(SET_CHILD_SUBREAPER, 1)
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _be_tests(tree, tests)
    descriptor = os.pidfd_open(pid)
    ended = select.select([descriptor], [], [], seconds)[0]
    os.close(descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if ended else None
    while left := psutil.Process().children(recursive=True):
        for process in left:
            process.kill()
        psutil.wait_procs(left)
    outcome = "timeout" if code is None else "failed" if code else "passed"
    return outcome, time.monotonic() - start


def _be_tests(tree: Path, tests: Sequence[str]) -> NoReturn:
    code = 1
    try:
        _prctl(SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        log = os.open(tree / "tests.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        os.environ["PYTHONPATH"] = str(tree)
        # The variable of ENVIRONMENT is read at a start, and this process was forked.
        # Two mutants of one size that are written within a second would share their
        # bytecode.
        sys.dont_write_bytecode = True
        import pytest

        arguments = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(tree),
            *tests,
        ]
        code = int(pytest.main(arguments, plugins=[_NearestFirst()]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


@dataclass
class Trees:
    """Copies of the tree, one for each process that runs tests, and how long its tests may take."""

    folder: Path
    seconds: dict[tuple[str, ...], float]

    def copy(self, root: Path, name: str) -> Path:
        return Path(
            shutil.copytree(
                root, self.folder / name, ignore=shutil.ignore_patterns(*NOT_COPIED)
            )
        )

    def run(self, mutant: Mutant) -> tuple[Mutant, str, float]:
        """Run one mutant's tests in this process's copy."""
        tree = self.folder / multiprocessing.current_process().name
        if not tree.exists():
            self.copy(self.folder / "unchanged", tree.name)
        path = tree / mutant.path
        path.write_text(mutant.source, encoding="utf-8")
        try:
            return mutant, *run_tests(tree, mutant.tests, self.seconds[mutant.tests])
        finally:
            shutil.copy2(self.folder / "unchanged" / mutant.path, path)


def score(
    root: Path, mutants: Sequence[Mutant], jobs: int
) -> Iterator[tuple[Mutant, str, float]]:
    """Yield every mutant with its tests' verdict and time, as they end.

    Raises:
        SystemExit: tests fail without a mutation.
    """
    os.environ.update(ENVIRONMENT)
    for name in IMPORTED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        trees = Trees(Path(folder), {})
        unchanged = trees.copy(root, "unchanged")
        for tests in dict.fromkeys(mutant.tests for mutant in mutants):
            outcome, seconds = run_tests(unchanged, tests, 900.0)
            if outcome != "passed":
                print((unchanged / "tests.log").read_text(errors="replace")[-4000:])
                raise SystemExit(f"without any mutation: {' '.join(tests)}: {outcome}")
            trees.seconds[tests] = SECONDS + 2 * seconds
            print(
                f"unchanged: {seconds:.1f} s: {' '.join(tests)}",
                file=sys.stderr,
                flush=True,
            )
        with multiprocessing.get_context("fork").Pool(
            jobs, _prctl, (SET_PDEATHSIG, signal.SIGKILL)
        ) as pool:
            # The workers end at once, and the copies go.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
            yield from pool.imap_unordered(trees.run, mutants)


def report(results: Iterable[tuple[Mutant, str, float]]) -> None:
    """Print each as it ends, then the score by folder, and the survivors."""
    killed: Counter[str] = Counter()
    total: Counter[str] = Counter()
    survivors = []
    for mutant, outcome, seconds in results:
        folder = mutant.path.split("/")[-2]
        for key in (folder, "all"):
            total[key] += 1
            killed[key] += outcome != "passed"
        word = (
            "SURVIVED"
            if outcome == "passed"
            else "killed"
            if outcome == "failed"
            else "timeout"
        )
        print(
            f"{total['all']:4d} {word:8s} {seconds:5.1f} s  {mutant}",
            file=sys.stderr,
            flush=True,
        )
        if outcome == "passed":
            survivors.append(mutant)
    for key in sorted(total, key=lambda key: (key == "all", key)):
        print(
            f"{key:15s} {killed[key]:4d} of {total[key]:4d} killed, {100 * killed[key] / total[key]:.1f} %"
        )
    print("survivors:" if survivors else "no survivors")
    for mutant in sorted(survivors, key=lambda mutant: (mutant.path, mutant.line)):
        print(f"  {mutant}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=int, default=300, help="mutants to run (300)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (0)")
    parser.add_argument(
        "--only",
        default="*",
        help="modules, as a pattern under megaverl/, such as 'reshard/*'",
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (1)")
    parser.add_argument(
        "--cosmic-ray",
        type=Path,
        metavar="DIR",
        help="the folder that it was installed into",
    )
    arguments = parser.parse_args()
    if arguments.cosmic_ray:
        # The last one: its dependencies do not hide installed ones.
        sys.path.append(str(arguments.cosmic_ray))
    try:
        mutants = list_mutants(
            ROOT / "megaverl", TARGETS, arguments.num, arguments.seed, arguments.only
        )
    except ImportError:
        raise SystemExit(MISSING) from None
    report(score(ROOT, mutants, arguments.jobs))


if __name__ == "__main__":
    main()
