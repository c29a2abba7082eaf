"""One temporary folder for a command and all processes that it starts.

Some libraries leave files in the system's temporary folder when a process is killed:
torch's agent its log folders, vLLM its sockets, Weights & Biases its media folders. So
a command creates a folder of its own and passes it to its processes as `TMPDIR`.

    with temporary_folder():
        ...                      # tempfile.gettempdir() is the folder, also in processes started here

The process that created the folder removes it when it ends. If that process was killed,
the next command on this machine removes it. A lock (flock) on the folder shows whether
a process still uses it. The kernel releases the lock when the last of these processes
has ended, however it ended.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import getpass
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "megaverl-"
INHERITED = "MEGAVERL_TEMPORARY"  # names the folder to processes that a command starts
SHARED_MEMORY = Path("/dev/shm")
# A socket's path has at most 107 bytes on Linux. vLLM appends "/" and a UUID of 36
# characters.
MAX_SOCKET_FOLDER = 107 - 37
SHORT_FOLDER = Path("/tmp")
# Part of the names of marker files in /dev/shm, one for each process.
MARK = ".used-by-"


@dataclass
class ClaimedFolder:
    """A folder that stays as long as a process holds its lock.

    Attributes:
        path: the folder.
        lock: file descriptor that holds the lock, or None if the file system has no locks.
        is_owner: whether this process created the folder, and removes it.
    """

    path: Path
    lock: int | None
    is_owner: bool

    def release(self) -> None:
        """Remove the folder if this process created it, then release the lock."""
        if self.is_owner:
            shutil.rmtree(self.path, ignore_errors=True)
            # torch creates its kernel cache, and often leaves it empty.
            with contextlib.suppress(OSError):
                _kernel_cache(self.path.parent).rmdir()
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None


_claimed: list[ClaimedFolder] = []  # folders that this process uses
# Process that may remove them; a forked copy inherits `_claimed` and must not.
_owner_pid = 0


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Use one temporary folder inside this block, in this process and in those that it starts."""
    before = {
        name: os.environ.get(name)
        for name in ("TMPDIR", INHERITED, "VLLM_RPC_BASE_PATH")
    }
    is_nested = bool(_claimed)
    folder = use_temporary_folder()
    try:
        yield folder
    finally:
        if not is_nested and _owner_pid == os.getpid():
            remove_temporary_folder()
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            tempfile.tempdir = None  # tempfile reads TMPDIR again


@contextlib.contextmanager
def folder_for_processes() -> Iterator[dict[str, str]]:
    """Yield environment variables for processes that are started and have ended inside this block.

    They use one temporary folder, which is removed with everything that they left in
    it. This process does not use it.
    """
    folders, variables = create_folder(Path(tempfile.gettempdir()))
    try:
        yield variables
    finally:
        for folder in folders:
            folder.release()


def use_temporary_folder() -> Path:
    """Use one temporary folder from here on: the one that the parent process names, or a new one.

    A second call in the same process returns the folder in use. If no folder can be
    created, the system's temporary folder is used unchanged.
    """
    global _owner_pid
    if _claimed:
        return _claimed[0].path
    if _owner_pid != os.getpid():
        _owner_pid = os.getpid()
        atexit.register(remove_temporary_folder)
    inherited = os.environ.get(INHERITED)
    if inherited and (folder := _join(Path(inherited))):
        _claimed.append(folder)
        tempfile.tempdir = inherited
        return folder.path
    # Let tempfile check again that TMPDIR can be written.
    tempfile.tempdir = None
    base = Path(tempfile.gettempdir())
    remove_abandoned(base)
    remove_abandoned(SHARED_MEMORY)
    try:
        folders, variables = create_folder(base)
    except OSError:
        # The disk may be full, and `megaverl doctor` must still start to report it.
        return base
    _claimed.extend(folders)
    os.environ |= variables
    tempfile.tempdir = variables["TMPDIR"]
    return folders[0].path


def create_folder(base: Path) -> tuple[list[ClaimedFolder], dict[str, str]]:
    """Create a temporary folder in `base`; return it, and the environment variables that make processes use it.

    If its path is too long for sockets, a second folder is created for them. The caller
    releases the folders when the processes have ended.

    Raises:
        OSError: a folder cannot be created in `base`.
    """
    folders = [_create(base)]
    path = str(folders[0].path)
    # torch keeps compiled kernels in the temporary folder by default. Later runs reuse
    # them, so they stay outside.
    kernels = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(_kernel_cache(base)))
    variables = {"TMPDIR": path, INHERITED: path, "TORCHINDUCTOR_CACHE_DIR": kernels}
    if (
        len(os.fsencode(path)) > MAX_SOCKET_FOLDER
        and "VLLM_RPC_BASE_PATH" not in os.environ
    ):
        remove_abandoned(SHORT_FOLDER)
        with contextlib.suppress(OSError):
            folders.append(_create(SHORT_FOLDER))
            variables["VLLM_RPC_BASE_PATH"] = str(folders[1].path)
    return folders, variables


def remove_temporary_folder() -> None:
    """Remove the folder of this process. A process that ends by `os._exit` must call this first."""
    if _owner_pid != os.getpid():
        return
    while _claimed:
        _claimed.pop().release()


def base_folder() -> Path:
    """Return the folder that contains the temporary folder: the user's TMPDIR, or /tmp."""
    return _claimed[0].path.parent if _claimed else Path(tempfile.gettempdir())


def remove_abandoned(base: Path) -> None:
    """Remove folders and files that commands left in `base` and whose processes have all ended."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(base):
            if (
                entry.name.startswith(PREFIX)
                and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
            ):
                _remove_if_abandoned(Path(entry.path))


def claim_shared_memory(name: str) -> int | None:
    """Mark `name` as a prefix of files in /dev/shm that this process uses; return the descriptor that holds the mark.

    When every process with such a mark has ended, the next command removes the mark and
    the files.
    """
    try:
        handle, hidden = tempfile.mkstemp(prefix=".megaverl-", dir=SHARED_MEMORY)
        # Lock the file before it has the name by which other commands look for it.
        fcntl.flock(handle, fcntl.LOCK_SH)
        os.rename(hidden, SHARED_MEMORY / f"{name}{MARK}{os.getpid()}")
    except OSError:
        return None
    return handle


def release_shared_memory(name: str, handle: int | None) -> None:
    """Remove this process's mark of `name`."""
    if handle is not None:
        (SHARED_MEMORY / f"{name}{MARK}{os.getpid()}").unlink(missing_ok=True)
        os.close(handle)


def _remove_if_abandoned(path: Path) -> None:
    mode = path.lstat().st_mode
    is_mark = stat.S_ISREG(mode) and MARK in path.name
    if not (is_mark or stat.S_ISDIR(mode)):
        return
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a process holds the lock, or the file system has none
        return
    else:
        if is_mark:
            _remove_marked(path)
        else:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(handle)


def _remove_marked(mark: Path) -> None:
    """Remove a mark without a process, and its files if it was the last mark."""
    name = mark.name.partition(MARK)[0]
    mark.unlink(missing_ok=True)
    files = [
        file for file in mark.parent.glob(f"{name}*") if not file.name.startswith(".")
    ]
    if not any(MARK in file.name for file in files):
        for file in files:
            file.unlink(missing_ok=True)


def _create(base: Path) -> ClaimedFolder:
    """Create a folder and lock it before it gets the name that other commands look for."""
    hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=base))
    lock = _lock(hidden)
    path = base / hidden.name.removeprefix(".")
    hidden.rename(path)
    return ClaimedFolder(path, lock, is_owner=True)


def _join(path: Path) -> ClaimedFolder | None:
    """Use a folder that another process created; return None if it is gone."""
    if not path.is_dir() or not os.access(path, os.W_OK):
        return None
    folder = ClaimedFolder(path, _lock(path), is_owner=False)
    # The folder may have been removed before it was locked.
    if not path.is_dir():
        folder.release()
        return None
    return folder


def _lock(path: Path) -> int | None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Shared: the command and each of its processes hold it together.
        fcntl.flock(handle, fcntl.LOCK_SH)
    except OSError:
        os.close(handle)
        return None
    return handle


def _kernel_cache(base: Path) -> Path:
    """Return the folder in which torch keeps compiled kernels when `base` is the temporary folder."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without an entry in /etc/passwd
        user = f"uid_{os.getuid()}"
    return base / ("torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))
