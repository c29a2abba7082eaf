"""The package itself: what importing costs, which package may use which, and what is packaged."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import megaverl
from megaverl.version import RELEASE
from tools.wheel_records import find_overlaps

ROOT = Path(megaverl.__file__).resolve().parents[1]
PACKAGE = ROOT / "megaverl"
HEAVY = ("torch", "vllm", "megatron", "transformers")

MAX_FUNCTION_LINES = 100

# From the bottom up: a package imports from those before it, and from itself.
ORDER = (
    "python_version",
    "lazy_names",
    "errors",
    "version",
    "announcements",
    "processes",
    "signal_handlers",
    "temporary",
    "gpus",
    "rank_environment",
    "outside",
    "http_server",
    "user_code",
    "plugins",
    "child_checks",
    "platform",
    "algorithms",
    "rewards",
    "distributed",
    "sharding",
    "rollout",
    "config",
    "data",
    "weights",
    "models",
    "workers",
    "monitoring",
    "checkpoint",
    "planner",
    "controller",
    "dataflow",
    "trainer",
    "utils",
    "cli",
    "__main__",
)
# First words of a docstring that hide its subject.
HIDING_OPENINGS = {
    *(
        "of",
        "what",
        "whether",
        "where",
        "how",
        "who",
        "whom",
        "whose",
        "those",
        "that",
        "as",
        "so",
        "which",
        "when",
    ),
    *("in", "by", "from", "for"),
}
LEVEL_OF = {name: number for number, name in enumerate(ORDER)}

# What a package does without, beyond what its place in the order says.
DOES_WITHOUT = {
    "config": ("torch", "vllm", "megaverl.platform"),
    "sharding": ("torch.distributed", "vllm", "megatron"),
    "algorithms": ("vllm", "megatron", "transformers", "megaverl.config"),
    "rewards": ("vllm", "megatron", "megaverl.algorithms"),
    "rollout/environments": (
        "torch",
        "vllm",
        "megatron",
        "transformers",
        "megaverl.algorithms",
    ),
    "distributed/placement.py": ("torch", "pydantic"),
    "distributed/placement_resolver.py": ("torch", "pydantic"),
    "data": ("vllm", "megatron"),
    "dataflow": ("megaverl.algorithms",),
    "controller": ("torch", "vllm", "megatron", "transformers"),
    "monitoring": ("vllm", "megatron", "transformers"),
}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "configs" not in path.parts)


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def imports(node: ast.AST, *, for_types: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import under `node`.

    `from a.b import c` gives "a.b.c": c may be a module.

    Args:
        for_types: include imports that are made only for type checkers.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((child.lineno, alias.name) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, (
                f"line {child.lineno}: relative imports hide which package is meant"
            )
            yield from (
                (child.lineno, f"{child.module}.{alias.name}") for alias in child.names
            )
        elif for_types or not is_for_types_only(child):
            yield from imports(child, for_types=for_types)


def package_of(dotted: str) -> str | None:
    """Of "megaverl.sharding.boxes.Box" it is "sharding", and None of what is outside megaverl."""
    parts = dotted.split(".")
    return (
        None
        if parts[0] != "megaverl" or len(parts) == 1 or parts[1] == "__version__"
        else parts[1]
    )


def starts_with(dotted: str, prefix: str) -> bool:
    return dotted == prefix or dotted.startswith(prefix + ".")


@pytest.mark.parametrize(
    "name", ["megaverl", "megaverl.config", "megaverl.cli.main", "megaverl.monitoring"]
)
def test_import_loads_no_heavy_library(name: str) -> None:
    code = f"import sys, {name}; print(*[n for n in {HEAVY} if n in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_megaverl_itself_imports_only_what_offers_its_names() -> None:
    code = "import sys; a = set(sys.modules); import megaverl; print(*sorted(set(sys.modules) - a))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    offering = ["megaverl.lazy_names", "megaverl.python_version", "megaverl.version"]
    assert done.stdout.split() == ["megaverl", *offering]


def test_the_version_stands_in_one_place() -> None:
    assert runpy.run_path(str(ROOT / "setup.py"))["read_version"]() in (
        RELEASE,
        megaverl.__version__,
    )
    assert megaverl.__version__ == RELEASE + (
        "+dev" if (ROOT / ".git").exists() else ""
    )
    line = re.compile(r"^(?:__version__|RELEASE)\s*=", flags=re.MULTILINE)
    assert [
        path.name for path in modules() if line.search(path.read_text(encoding="utf-8"))
    ] == ["version.py"]
    assert "\nversion" not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def first_word(docstring: str) -> str:
    return docstring.split()[0].strip("`*:,.").lower()


def test_docstrings_open_with_a_verb_or_their_subject() -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    hiding = []
    for path in modules():
        nodes = (
            node
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, documented)
        )
        for docstring in map(ast.get_docstring, nodes):
            if docstring and first_word(docstring) in HIDING_OPENINGS:
                hiding.append(f"{path.relative_to(ROOT)}: {docstring.splitlines()[0]}")
    assert hiding == [], (
        "open a function's docstring with a verb, and any other with a noun phrase"
    )


def is_interface(node: ast.stmt) -> bool:
    """Return whether a statement of an `__init__.py` only offers names: imports, `__all__`, or lazy access to names."""
    if isinstance(node, ast.Import | ast.ImportFrom) or is_for_types_only(node):
        return True
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) in (
            "__all__",
            "__getattr__",
            "TYPE_CHECKING",
        )
    if isinstance(node, ast.FunctionDef):
        return node.name == "__dir__"
    return ast.unparse(node) == "check_python()"


def test_packages_hold_their_code_in_modules() -> None:
    code = []
    for path in PACKAGE.rglob("__init__.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
        code += [
            f"{path.relative_to(ROOT)}:{node.lineno}"
            for node in body
            if not is_interface(node)
        ]
    assert code == [], "move this code to a module that is named after its idea"


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {
        path.parent for path in [*modules(), *(ROOT / "tests").rglob("test_*.py")]
    }
    assert [
        str(folder.relative_to(ROOT))
        for folder in folders
        if not (folder / "__init__.py").exists()
    ] == []


def test_every_package_has_its_place() -> None:
    packages = {path.stem for path in PACKAGE.glob("*.py")} | {
        path.parent.name for path in PACKAGE.glob("*/*.py")
    }
    assert packages - {"__init__"} == set(ORDER)


def test_no_package_imports_one_above_it() -> None:
    wrong = []
    for path in modules():
        own = package_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if own is None or own == "__init__":
            continue
        for line, dotted in imports(ast.parse(path.read_text(encoding="utf-8"))):
            other = package_of(dotted)
            if other is not None and other != own and LEVEL_OF[other] >= LEVEL_OF[own]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {own} imports {other}")
    assert wrong == []


def test_no_package_knows_what_it_should_not() -> None:
    wrong = []
    for path in modules():
        for line, dotted in imports(ast.parse(path.read_text(encoding="utf-8"))):
            for folder, strangers in DOES_WITHOUT.items():
                if path.is_relative_to(PACKAGE / folder):
                    wrong += [
                        f"{path.relative_to(ROOT)}:{line}: {dotted}"
                        for n in strangers
                        if starts_with(dotted, n)
                    ]
    assert wrong == []


def code_lines(
    function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]
) -> int:
    """Count a function's lines without its docstring, comments and blank lines."""
    docstring = function.body[0] if ast.get_docstring(function) is not None else None
    first = (
        function.body[0].lineno
        if docstring is None
        else (docstring.end_lineno or docstring.lineno) + 1
    )
    body = [line.strip() for line in lines[first - 1 : function.end_lineno]]
    return sum(bool(line) and not line.startswith("#") for line in body)


def test_functions_stay_short() -> None:
    """Bound the length of a function's code. A module has no limit: it ends where its idea ends."""
    files = sorted((ROOT / "megaverl").rglob("*.py"))
    functions = [
        f"{path}:{node.lineno} {node.name}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and code_lines(node, path.read_text(encoding="utf-8").splitlines())
        >= MAX_FUNCTION_LINES
    ]
    assert functions == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for type checkers count as well: a circle means that two modules are one idea, or three."""
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in modules()
    }
    imported: dict[str, set[str]] = {}
    for name, path in names.items():
        dotted_names = {
            dotted
            for _, dotted in imports(
                ast.parse(path.read_text(encoding="utf-8")), for_types=True
            )
        }
        targets = {
            dotted if dotted in names else dotted.rpartition(".")[0]
            for dotted in dotted_names
        }
        imported[name] = targets & names.keys() - {name}
    # Take away modules that import none of the remaining ones. What stays is in a
    # circle, or imports one.
    while free := [
        name for name, targets in imported.items() if not targets & imported.keys()
    ]:
        for name in free:
            del imported[name]
    path: list[str] = []
    following = min(imported, default="")
    while following and following not in path:
        path.append(following)
        following = min(imported[following] & imported.keys())
    circle = path[path.index(following) :] if path else []
    assert circle == [], "these modules import each other in turn"


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice == {}


def test_what_is_imported_is_declared() -> None:
    setup = runpy.run_path(str(ROOT / "setup.py"))
    lines = [
        *setup["INSTALL_REQUIRES"],
        *(line for extra in setup["EXTRAS_REQUIRE"].values() for line in extra),
    ]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    providers = metadata.packages_distributions()
    undeclared = set()
    for path in modules():
        for _, dotted in imports(ast.parse(path.read_text(encoding="utf-8"))):
            top = dotted.split(".")[0]
            # one that is not installed, as of an extra, is taken to be named as it is
            # imported
            names = {canonicalize_name(name) for name in providers.get(top, [top])}
            if (
                top not in (*sys.stdlib_module_names, "megaverl", "pydantic_core")
                and not names & declared
            ):
                undeclared.add(f"{path.relative_to(ROOT)}: {top}")
    # Absent on this machine, and imported behind a guard; each comes with a GPU or with
    # an extra.
    known = {"transformer_engine", "apex", "flash_attn", "pynvml"}
    assert {entry for entry in undeclared if entry.split(": ")[1] not in known} == set()


def test_a_release_is_whole(tmp_path: Path) -> None:
    """A checkout makes an archive, that a wheel, and the wheel alone is the program in a new environment.

    The environment sees the packages that are installed here, and nothing of the
    checkout.
    """
    for module in ("build", "twine"):
        pytest.importorskip(
            module, reason=f"{module} is not installed (pip install 'megaverl[test]')"
        )
    source, dist, version = tmp_path / "source", tmp_path / "dist", f"{RELEASE}+dev"
    for path in tracked_files():
        (copy := source / path.relative_to(ROOT)).parent.mkdir(
            parents=True, exist_ok=True
        )
        shutil.copy(path, copy)
    (source / ".git").mkdir()  # a checkout without a tag

    def run(*command: str | Path, at: Path = tmp_path) -> str:
        clean = {
            name: value for name, value in os.environ.items() if name != "PYTHONPATH"
        }
        done = subprocess.run(
            command, cwd=at, env=clean, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
        return done.stdout

    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, at=source)
    archive, wheel = sorted(dist.iterdir(), key=lambda path: path.suffix)
    assert (archive.name, wheel.name) == (
        f"megaverl-{version}.tar.gz",
        f"megaverl-{version}-py3-none-any.whl",
    )
    run(sys.executable, "-m", "twine", "check", "--strict", archive, wheel)

    venv.create(tmp_path / "venv", symlinks=True)
    python, packages = (
        tmp_path / "venv" / "bin" / "python",
        next((tmp_path / "venv" / "lib").glob("*/site-packages")),
    )
    (packages / "others.pth").write_text(
        "\n".join({sysconfig.get_path(name) for name in ("purelib", "platlib")})
    )
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        wheel,
    )
    about = packages / f"megaverl-{version}.dist-info"
    found = Metadata.from_email((about / "METADATA").read_bytes(), validate=True)
    assert (str(found.version), found.license_files) == (version, ["LICENSE"])
    assert (about / "licenses" / "LICENSE").read_bytes() == (
        ROOT / "LICENSE"
    ).read_bytes()
    assert any(
        line.startswith("Development Status ::") for line in found.classifiers or []
    )
    # An index of packages has no such files.
    assert found.description and "](docs/" not in found.description
    configs = packages / "megaverl" / "configs"
    compiled = "__pycache__"  # of programs that a test has imported
    carried = {
        path.relative_to(configs)
        for path in configs.rglob("*.*")
        if compiled not in path.parts
    }
    expected = [
        path for path in (ROOT / "configs").rglob("*.*") if compiled not in path.parts
    ]
    assert carried == {path.relative_to(ROOT / "configs") for path in expected}
    megaverl = tmp_path / "venv" / "bin" / "megaverl"
    assert run(megaverl, "--version").split()[-1] == version
    assert str(configs) in run(megaverl, "recipes")
    run(megaverl, "quickstart", "--dry-run")
    given = ["--no-file-checks", "model.path=model", "data.train=[train.jsonl]"]
    run(
        megaverl,
        "train",
        "--config",
        configs / "gsm8k_smollm2/ppo.yaml",
        "--dry-run",
        *given,
    )


def test_an_archive_of_a_checkout_makes_wheels_of_its_own_version(
    tmp_path: Path,
) -> None:
    for name in ("setup.py", "megaverl/version.py"):
        (copy := tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, copy)
    version = runpy.run_path(str(tmp_path / "setup.py"))["read_version"]
    assert version() == RELEASE
    (tmp_path / "PKG-INFO").write_text(
        f"Metadata-Version: 2.4\nName: megaverl\nVersion: {RELEASE}+dev\n\nVersion: 9\n"
    )
    assert version() == f"{RELEASE}+dev"


def test_apex_is_never_a_dependency() -> None:
    """PyPI's package of that name is unrelated to NVIDIA's."""
    files = [ROOT / "setup.py", *(ROOT / "requirements").glob("*.lock")]
    for path in files:
        assert not re.search(
            r"""^\s*["']?apex\b""", path.read_text(encoding="utf-8"), flags=re.MULTILINE
        ), path


def lock_lines(name: str) -> list[str]:
    lines = (
        (ROOT / "requirements" / f"{name}.lock")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize(
    "name",
    [
        "cpu-py311",
        "cpu-py312",
        "gsm8k",
        "bench",
        "environments",
        "reasoning-gym",
        "tinker",
        "tinker-recipes",
        "cuda-py312",
        "resiliency-py312",
        "harbor-py312",
        "nemo-gym-py312",
    ],
)
def test_a_lock_holds_exact_versions_and_nothing_else(name: str) -> None:
    lines = [
        line.removesuffix("  # no wheel: built from its source")
        for line in lock_lines(name)
    ]
    assert lines and lines == sorted(lines, key=lambda line: line.split("==")[0])
    assert [
        line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.+!]+", line)
    ] == []
    assert len({line.split("==")[0] for line in lines}) == len(lines)


@pytest.mark.parametrize("lock", ["cpu-py311", "cpu-py312", "cuda-py312"])
def test_the_lock_serves_what_setup_declares(lock: str) -> None:
    setup = runpy.run_path(str(ROOT / "setup.py"))
    pins = dict(line.split("  #")[0].split("==") for line in lock_lines(lock))
    served = runpy.run_path(
        str(ROOT / "tools" / "update_lock.py"), run_name="update_lock"
    )
    own = next(each for each in served["locks"]() if each.name == lock)
    if own.like:
        first, other = (
            dict(line.split("  #")[0].split("==") for line in lock_lines(name))
            for name in own.like
        )
        assert pins == first | {name: other[name] for name in served["OF_MEGATRON"]}
    extras = [line for name in own.extras for line in setup["EXTRAS_REQUIRE"][name]]
    for line in [*setup["INSTALL_REQUIRES"], *extras]:
        wanted = Requirement(line)
        pin = pins.get(canonicalize_name(wanted.name))
        assert pin is not None and wanted.specifier.contains(pin), (
            f"{line} is locked as {pin}: update_lock.py"
        )


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="the lock is for Python 3.11"
)
def test_what_is_locked_runs_under_the_oldest_python() -> None:
    """Debian 12's; pip would say so at an installation there."""
    oldest = runpy.run_path(
        str(ROOT / "tools" / "update_lock.py"), run_name="update_lock"
    )["OLDEST_PYTHON"]
    locked = {line.split("==")[0] for line in lock_lines("cpu-py311")}
    here = {
        canonicalize_name(each.metadata["Name"]): each.metadata["Requires-Python"]
        for each in metadata.distributions()
    }
    assert {
        name: said
        for name, said in here.items()
        if name in locked and oldest not in SpecifierSet(said or "")
    } == {}


def test_no_installed_file_has_two_owners() -> None:
    """Of what the base lock names; the wheels that are not installed here are compared by `tools/update_lock.py`."""
    locked = {line.split("==")[0] for line in lock_lines("cpu-py311")}
    records: dict[str, dict[str, str]] = {}
    for distribution in metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        if name in locked:
            files = distribution.files or []
            records[name] = {
                str(file): file.hash.value
                for file in files
                if file.hash and ".dist-info/" not in str(file)
            }
    assert len(records) > 100
    assert [str(overlap) for overlap in find_overlaps(records)] == []


def tracked_files() -> list[Path]:
    """Git's files; outside a checkout, all that is not built or ignored."""
    command = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0 and done.stdout:
        return [
            path
            for name in done.stdout.split("\0")
            if name and (path := ROOT / name).is_file()
        ]
    folders = (
        "megaverl",
        "tests",
        "tools",
        "launch",
        "configs",
        "docs",
        "requirements",
        ".ci",
    )
    found = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    ]
    return [
        path
        for path in [*found, *ROOT.glob("*.*")]
        if path.is_file() and path.suffix != ".pyc"
    ]


def test_no_file_names_a_machine_or_a_registry() -> None:
    """Paths of one machine and hosts of package registries do not belong into a repository.

    PyTorch's public wheel index is the one exception. The patterns are written so as
    not to find themselves.
    """
    machine = r"(?<![\w.$}\-])/(?:home|root|work|opt|Users|tmp/boot)/[\w.]"
    registry = r"https?://(?!download\.pytorch\.org)[\w.\-]*(?:py[p]i|regis[t]ry|art[i]factory|ne[x]us|mir[r]or)[\w.\-]*"
    pattern = re.compile(f"{machine}|{registry}")
    wrong = []
    for path in tracked_files():
        if path.suffix in (".png", ".parquet", ".safetensors", ".model"):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), start=1):
            if pattern.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert wrong == []


def test_launch_scripts_run_and_stop_at_errors() -> None:
    scripts = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / ".ci" / "run"]
    assert {"bootstrap.sh", "quickstart.sh", "test.sh", "run"} <= {
        path.name for path in scripts
    }
    for path in scripts:
        text = path.read_text(encoding="utf-8")
        assert path.stat().st_mode & 0o111, f"{path.name} is not executable"
        assert "set -euo pipefail" in text or "bootstrap.sh" in text, path.name
        subprocess.run(["bash", "-n", str(path)], check=True)
