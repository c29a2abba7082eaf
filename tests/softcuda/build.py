"""Compile the software device for this interpreter's torch.

    python -m tests.softcuda.build FOLDER

Half a minute on two cores, once for each version of the sources and of torch; `build`
returns at once where it is done.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
# Loaded before torch, which asks for a device once.
DEVICE = ("clocks", "device", "kernels")
EXTENSION = "softcuda_extension"  # a module of Python's, loaded with torch
FLAGS = ("-fPIC", "-O1", "-g0", "-std=c++20")


def build(folder: Path) -> Path:
    """Return the folder below `folder` with the libraries, which are compiled if they are not there."""
    target = folder / f"softcuda-{_digest()}"
    folder.mkdir(parents=True, exist_ok=True)
    # Workers of a test run ask at the same time.
    with (folder / "softcuda.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / f"{EXTENSION}.so").exists():
            target.mkdir(exist_ok=True)
            _compile(target)
    return target


def _digest() -> str:
    digest = hashlib.sha256(
        f"{version('torch')} {sys.implementation.cache_tag}".encode()
    )
    for path in (
        *sorted(HERE.glob("*.cpp")),
        *sorted(HERE.glob("*.h")),
        Path(__file__),
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(folder: Path) -> None:
    found = find_spec("torch")
    assert found is not None and found.origin is not None
    torch_folder = Path(found.origin).parent
    library = torch_folder / "lib"
    headers = [
        torch_folder / "include",
        torch_folder / "include/torch/csrc/api/include",
    ]
    headers.append(Path(sysconfig.get_paths()["include"]))
    includes = [f"-I{header}" for header in headers]
    of_extension = [
        f"-DTORCH_EXTENSION_NAME={EXTENSION}",
        "-DUSE_DISTRIBUTED",
        "-DUSE_C10D",
    ]

    def compile_one(name: str) -> Path:
        made = folder / f"{name}.o"
        defines = of_extension if name == "nccl" else []
        _run("g++", *FLAGS, *includes, *defines, "-c", HERE / f"{name}.cpp", "-o", made)
        return made

    with ThreadPoolExecutor(2) as threads:
        *device, extension = threads.map(
            compile_one, ("kernels", "device", "clocks", "nccl")
        )
    paths = [
        f"-L{library}",
        f"-L{folder}",
        f"-Wl,-rpath,{library}",
        f"-Wl,-rpath,{folder}",
    ]
    _run(
        "g++",
        "-shared",
        *device,
        "-o",
        folder / "libsoftcuda.so",
        *paths,
        "-ltorch_cpu",
        "-lc10",
    )
    linked = ["-lsoftcuda", "-ltorch_python", "-ltorch_cpu", "-lc10"]
    _run("g++", "-shared", extension, "-o", folder / "new.so", *paths, *linked)
    # Last: it says that all is there.
    (folder / "new.so").rename(folder / f"{EXTENSION}.so")


def _run(*words: str | Path) -> None:
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{words[0]} ended with {done.returncode}: {done.stderr[-4000:]}"
        )


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
