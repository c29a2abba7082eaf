"""What a confined process can reach and use: a file system that cannot be written, no network, few resources.

There are three ways to take the file system away. `namespaces` of root (mount, process, network, IPC): the process sees
Python's library and nothing else. `user_namespaces`: the same for an ordinary user. `landlock`, where both are refused,
as in most containers: it sees that other files are there, and reads none of them. Each goes with a filter of system
calls (`system_calls`), limits on resources, and no capabilities.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megaverl.processes import end_with_parent
from megaverl.rewards.sandbox import system_calls

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 0x1000, 0x4000, 0x40000, 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
CAPSET = {"x86_64": 126, "aarch64": 91}
MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 442, 444, 445, 446  # on every architecture
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
READ_ONLY_NOSUID_NODEV = 1 | 2 | 4  # MOUNT_ATTR_*
LANDLOCK_ALL, LANDLOCK_READ_FILE, LANDLOCK_READ_DIR = 0x1FFF, 4, 8  # LANDLOCK_ACCESS_FS_* of its first version
FIRST_USER, NOBODY = 1_000_000, 65534
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo")
MAX_OPEN = 64

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Boundary:
    """paths: what can be read. is_namespace: this process is in namespaces, else Landlock is set for each program.

    counts_threads: whether the kernel counts the threads of this user by themselves.
    """

    paths: Sequence[str]
    is_namespace: bool
    counts_threads: bool


def readable_paths(packages: Sequence[str]) -> list[str]:
    """Python's library, these folders and the libraries that both load: without links, none inside another."""
    places = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")]
    found = {os.path.realpath(path) for path in (*places, *packages, *LIBRARIES) if os.path.exists(path)}
    return sorted(path for path in found if not any(Path(path).is_relative_to(other) for other in found - {path}))


def enter(mechanism: str, packages: Sequence[str] = ()) -> Boundary:
    """Make a boundary, and be inside of it. With namespaces this forks and returns in the child, process 1 there.

    Args:
        packages: folders of packages that programs may import.

    Raises:
        OSError: the kernel, or the container, refuses it.
    """
    system_calls.machine()
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")  # the first to go where memory ends
    paths = readable_paths(packages)
    if mechanism == "landlock":
        _checked("landlock_create_ruleset", _libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))
        _drop_capabilities()
        return Boundary(paths, is_namespace=False, counts_threads=False)
    user, group, number = os.getuid(), os.getgid(), os.getpid()
    as_root = mechanism == "namespaces"
    apart = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    _checked("unshare", _libc.unshare(apart if as_root else apart | CLONE_NEWUSER))
    if not as_root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path(f"/proc/self/{name}").write_text(text, encoding="ascii")
    starter = os.getppid()
    child = os.fork()
    if child:
        end_with_parent(starter)  # a change of user or namespace forgets it
        _wait_for(child)
    links = {path: os.readlink(path) for path in LIBRARIES if os.path.islink(path)}
    _private_root(paths, links)
    if as_root:
        _become_ordinary(number)
    _drop_capabilities()
    _checked("prctl", _libc.prctl(1, signal.SIGKILL))  # PR_SET_PDEATHSIG; its parent has no number in here
    os.setsid()
    return Boundary(paths, is_namespace=True, counts_threads=as_root or user != 0)


def confine(boundary: Boundary, *, memory_mb: int, seconds: float, threads: int) -> None:
    """Give up everything that a program need not have, for good. The last thing before it runs."""
    most = {
        resource.RLIMIT_AS: memory_mb * 2**20,
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: MAX_OPEN,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 64,
    }
    if boundary.counts_threads:
        most[resource.RLIMIT_NPROC] = threads + 3  # this one, the one that waits for it, and the one of the tests
    for what, limit in most.items():
        _, hard = resource.getrlimit(what)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (limit, limit))
    _checked("prctl", _libc.prctl(system_calls.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if not boundary.is_namespace:
        _landlock(boundary.paths)
    system_calls.install(system_calls.build_filter(os.getpid(), threads=boundary.counts_threads and threads > 0))


def _checked(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _wait_for(child: int) -> None:
    """Stand outside, for whoever started this one, until the child ends; then end as it did."""
    os.closerange(0, 3)
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    given = [text.encode() if text is not None else None for text in (source, target, kind)]
    text = data.encode() if data else None
    _checked(f"mount {target}", _libc.mount(*given, ctypes.c_ulong(flags), text))


def _read_only(target: str) -> None:
    """A mount and those below it."""
    attributes = struct.pack("QQQQ", READ_ONLY_NOSUID_NODEV, 0, 0, 0)
    flags, size = ctypes.c_uint(AT_RECURSIVE), ctypes.c_size_t(len(attributes))
    done = _libc.syscall(MOUNT_SETATTR, AT_FDCWD, target.encode(), flags, attributes, size)
    _checked(f"mount_setattr {target}", done)


def _private_root(paths: Sequence[str], links: dict[str, str]) -> None:
    """A root that has these paths alone: a tmpfs in which they are mounted, as bubblewrap does it."""
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    os.mkdir("/tmp/old")
    os.mkdir("/tmp/new")
    pivot = PIVOT_ROOT[system_calls.machine()]
    _checked("pivot_root", _libc.syscall(pivot, b"/tmp", b"/tmp/old"))
    os.chdir("/")
    _mount("tmpfs", "/new", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    for path in paths:
        source, target = f"/old{path}", Path(f"/new{path}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir(exist_ok=True) if os.path.isdir(source) else target.touch()
        _mount(source, str(target), None, MS_BIND | MS_REC)
        _read_only(str(target))
    for path, to in links.items():
        Path(f"/new{path}").parent.mkdir(parents=True, exist_ok=True)
        os.symlink(to, f"/new{path}")
    os.chdir("/new")
    _checked("umount", _libc.umount2(b"/old", MNT_DETACH))
    _checked("pivot_root", _libc.syscall(pivot, b".", b"."))
    _checked("umount", _libc.umount2(b".", MNT_DETACH))
    os.chdir("/")
    _read_only("/")


def _become_ordinary(number: int) -> None:
    """From root to a user that nobody else is, so that its processes are counted by themselves."""
    for user in (FIRST_USER + number, NOBODY):
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            return
        except OSError as error:  # a number that this user namespace does not have
            refused = error
    raise refused


def _drop_capabilities() -> None:
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)  # _LINUX_CAPABILITY_VERSION_3, this thread
    _checked("capset", _libc.syscall(CAPSET[system_calls.machine()], header, none))


def _landlock(paths: Sequence[str]) -> None:
    rules = struct.pack("Q", LANDLOCK_ALL)
    ruleset = _checked("landlock", _libc.syscall(LANDLOCK_CREATE, rules, ctypes.c_size_t(len(rules)), 0))
    for path in paths:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        access = LANDLOCK_READ_FILE | (LANDLOCK_READ_DIR if os.path.isdir(path) else 0)
        rule = struct.pack("=Qi", access, place)
        _checked(f"landlock {path}", _libc.syscall(LANDLOCK_ADD, ruleset, 1, rule, 0))
        os.close(place)
    _checked("landlock", _libc.syscall(LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)
