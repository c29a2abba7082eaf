"""Confinement of a process: a read-only file system, no network, and limits on resources.

There are three ways to take the file system away. `namespaces`, as root (mount,
process, network, IPC): the process sees only Python's library. `user_namespaces`: the
same for an ordinary user. `landlock`, if both are refused, as in most containers: the
process sees that other files exist, but cannot read them. Each is combined with a
filter of system calls, resource limits, and no capabilities.

    1. enter: make the boundary, once per worker
    2. fork for each program
    3. confine: limits, Landlock and the seccomp filter, as the last thing before the program runs

The filter is one of seccomp(2) in classic BPF. System calls that it does not list fail
with EPERM: a program cannot start programs or processes, open sockets, change files, or
signal, trace or inspect other processes.

Why by hand: pyseccomp needs the C library libseccomp, which slim containers lack, and
would replace only the filter, 40 of these 440 lines. bubblewrap has no Landlock, and
needs user namespaces, which most containers refuse. It also starts a process for each
program: Python alone takes 40 ms to start here, and a fork of a worker with its
confinement 9 ms.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megaverl.processes import end_with_parent

# System calls that a confined program may make, each with its numbers on x86_64 and
# aarch64 (asm/unistd_64.h and asm-generic/unistd.h of Linux). None: the architecture
# has no such call, since a newer one replaces it there.
ALLOWED: dict[str, tuple[int, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "open": (2, None),
    "openat": (257, 56),
    "close": (3, 57),
    "close_range": (436, 436),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "statfs": (137, 43),
    "fstatfs": (138, 44),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "lseek": (8, 62),
    "umask": (95, 166),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "mincore": (27, 232),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "eventfd2": (290, 19),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "futex": (202, 98),
    "futex_waitv": (449, 449),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "rseq": (334, 293),
    "membarrier": (324, 283),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "getcpu": (309, 168),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "getrusage": (98, 165),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    "alarm": (37, None),
    "pause": (34, None),
    "timer_create": (222, 107),
    "timer_settime": (223, 110),
    "timer_gettime": (224, 108),
    "timer_delete": (226, 111),
    "timer_getoverrun": (225, 109),
    "timerfd_create": (283, 85),
    "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getpgrp": (111, None),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getgroups": (115, 158),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "getrandom": (318, 278),
    "getrlimit": (97, 163),
    "arch_prctl": (158, None),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "wait4": (61, 260),
    "waitid": (247, 95),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "shutdown": (48, 210),
    "getsockopt": (55, 209),
    "setsockopt": (54, 208),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
}
# (x86_64, aarch64) numbers of calls that are allowed only with some values of an
# argument.
CLONE, CLONE3, KILL, TGKILL, PRLIMIT = (
    (56, 220),
    (435, 435),
    (62, 129),
    (234, 131),
    (302, 261),
)
SOCKETPAIR, IOCTL, PRCTL, FCNTL = (53, 199), (16, 29), (157, 167), (72, 25)
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

CLONE_THREAD, AF_UNIX, PR_SET_NAME = 0x10000, 1, 15
# TCGETS TIOCGWINSZ FIONREAD FIONBIO FIO(N)CLEX.
TERMINAL_AND_FLAGS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# F_DUPFD, F_GETFD ... F_SETFL, F_DUPFD_CLOEXEC. F_SETOWN is missing: it could send
# signals to other processes.
DUP_AND_FLAGS = (0, 1, 2, 3, 4, 1030)
ALLOW, REFUSE, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ARCH, NUMBER, ARGUMENTS = 4, 0, 16  # offsets in struct seccomp_data
PR_SET_SECCOMP, FILTER_MODE, PR_SET_NO_NEW_PRIVS = 22, 2, 38


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def machine() -> str:
    """Return the architecture if its system calls are known here.

    Raises:
        OSError: they are not.
    """
    name = platform.machine()
    if name not in AUDIT_ARCH or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise OSError(
            f"system call numbers are not known for {name}, only for {', '.join(AUDIT_ARCH)}"
        )
    return name


def build_filter(pid: int, *, threads: bool) -> bytes:
    """Return the filter for the process `pid`.

    Args:
        threads: whether the process may have threads. It may never have child processes.
    """
    name = machine()
    column = list(AUDIT_ARCH).index(name)
    lines = [
        _line(LOAD, ARCH),
        _line(EQUAL, AUDIT_ARCH[name], 1, 0),
        _line(RETURN, KILL_PROCESS),
        _line(LOAD, NUMBER),
    ]
    for numbers in ALLOWED.values():
        number = numbers[column]
        if number is not None:
            lines += [_line(EQUAL, number, 0, 1), _line(RETURN, ALLOW)]

    def one_of(
        call: tuple[int, int], argument: int, values: tuple[int, ...], test: int = EQUAL
    ) -> None:
        """Allow a call if an argument (its low half, as these are ints) passes `test` with one of the values."""
        checks = [
            _line(test, value, len(values) - place)
            for place, value in enumerate(values)
        ]
        block = [
            _line(LOAD, ARGUMENTS + 8 * argument),
            *checks,
            _line(RETURN, REFUSE | errno.EPERM),
        ]
        lines.extend(
            [
                _line(EQUAL, call[column], 0, len(block) + 1),
                *block,
                _line(RETURN, ALLOW),
            ]
        )

    if threads:
        one_of(CLONE, 0, (CLONE_THREAD,), ANY_BIT)
    one_of(KILL, 0, (pid,))
    one_of(TGKILL, 0, (pid,))
    one_of(PRLIMIT, 0, (0, pid))
    one_of(SOCKETPAIR, 0, (AF_UNIX,))
    one_of(IOCTL, 1, TERMINAL_AND_FLAGS)
    one_of(PRCTL, 0, (PR_SET_NAME,))
    one_of(FCNTL, 1, DUP_AND_FLAGS)
    # clone3 passes its flags in memory, which a filter cannot read. After ENOSYS glibc
    # uses clone, whose flags it can.
    lines += [_line(EQUAL, CLONE3[column], 0, 1), _line(RETURN, REFUSE | errno.ENOSYS)]
    return b"".join([*lines, _line(RETURN, REFUSE | errno.EPERM)])


def install_filter(program: bytes) -> None:
    """Put this process under the filter permanently.

    Raises:
        OSError: the kernel refuses it.
    """

    class _Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    compiled = _Filter(len(program) // 8, program)
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0),
        (PR_SET_SECCOMP, FILTER_MODE, ctypes.addressof(compiled)),
    ):
        if libc.prctl(*arguments, 0, 0):
            raise OSError(
                ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}"
            )


CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = (
    0x20000,
    0x4000000,
    0x8000000,
    0x10000000,
)
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = (
    2,
    4,
    0x1000,
    0x4000,
    0x40000,
    2,
)
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
CAPSET = {"x86_64": 126, "aarch64": 91}
# On every architecture.
MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 442, 444, 445, 446
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
READ_ONLY_NOSUID_NODEV = 1 | 2 | 4  # MOUNT_ATTR_*
# LANDLOCK_ACCESS_FS_* of its first version.
LANDLOCK_ALL, LANDLOCK_READ_FILE, LANDLOCK_READ_DIR = 0x1FFF, 4, 8
FIRST_USER, NOBODY = 1_000_000, 65534
LIBRARIES = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/etc/ld.so.cache",
    "/usr/share/zoneinfo",
)
MAX_OPEN = 64

libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Boundary:
    """A boundary that this process is behind.

    Attributes:
        paths: what can be read.
        is_namespace: this process is in namespaces; otherwise Landlock is set for each program.
        counts_threads: whether the kernel counts the threads of this user separately.
    """

    paths: Sequence[str]
    is_namespace: bool
    counts_threads: bool


def _places(packages: Sequence[str]) -> list[str]:
    """List Python's library, these folders, and the libraries that both load."""
    library_paths = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")]
    return [
        path for path in (*library_paths, *packages, *LIBRARIES) if os.path.exists(path)
    ]


def readable_paths(packages: Sequence[str]) -> list[str]:
    """List those places with links resolved, without places inside others."""
    real_paths = {os.path.realpath(path) for path in _places(packages)}
    return sorted(
        path
        for path in real_paths
        if not any(Path(path).is_relative_to(parent) for parent in real_paths - {path})
    )


def enter(mechanism: str, packages: Sequence[str] = ()) -> Boundary:
    """Make a boundary and move behind it. With namespaces this forks and returns in the child, process 1 there.

    Args:
        packages: folders of packages that programs may import.

    Raises:
        OSError: the kernel or the container refuses it.
    """
    machine()
    # If memory runs out, the kernel should kill this process first.
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    paths = readable_paths(packages)
    if mechanism == "landlock":
        checked(
            "landlock_create_ruleset",
            libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1),
        )
        _drop_capabilities()
        return Boundary(paths, is_namespace=False, counts_threads=False)
    # Read before the user changes.
    user, group, number = os.getuid(), os.getgid(), os.getpid()
    as_root = mechanism == "namespaces"
    namespaces = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    checked(
        "unshare", libc.unshare(namespaces if as_root else namespaces | CLONE_NEWUSER)
    )
    if not as_root:
        # The kernel demands this order: groups cannot be mapped before setgroups is denied.
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            Path(f"/proc/self/{name}").write_text(text, encoding="ascii")
    starter = os.getppid()
    child = os.fork()
    if child:
        # The kernel clears this setting when the user or the namespace changes.
        end_with_parent(starter)
        _wait_for(child)
    links = {path: os.readlink(path) for path in LIBRARIES if os.path.islink(path)}
    # If Python's folder is a link, its imports use the link's name, so the link must
    # exist inside too.
    for place in _places(packages):
        links.setdefault(place, os.path.realpath(place))
    _private_root(paths, links)
    if as_root:
        _become_ordinary(number)
    _drop_capabilities()
    # PR_SET_PDEATHSIG. The parent is outside the namespace, so its process number
    # cannot be checked here.
    checked("prctl", libc.prctl(1, signal.SIGKILL))
    os.setsid()
    return Boundary(paths, is_namespace=True, counts_threads=as_root or user != 0)


def confine(
    boundary: Boundary, *, memory_mb: int, seconds: float, threads: int
) -> None:
    """Permanently give up everything that a program does not need. The last thing before it runs."""
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
        # Three more: this process, the one that waits for it, and the one with the
        # tests.
        most[resource.RLIMIT_NPROC] = threads + 3
    for kind, limit in most.items():
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    checked("prctl", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if not boundary.is_namespace:
        _landlock(boundary.paths)
    install_filter(
        build_filter(os.getpid(), threads=boundary.counts_threads and threads > 0)
    )


def checked(call: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def _wait_for(child: int) -> None:
    """Wait outside the namespace until the child ends, and then end with its code, for
    the process that started this one.
    """
    os.closerange(0, 3)
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def mount(
    source: str, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    encoded = [
        text.encode() if text is not None else None for text in (source, target, kind)
    ]
    text = data.encode() if data else None
    checked(f"mount {target}", libc.mount(*encoded, ctypes.c_ulong(flags), text))


def make_read_only(target: str) -> None:
    """Make a mount and those below it read-only."""
    attributes = struct.pack("QQQQ", READ_ONLY_NOSUID_NODEV, 0, 0, 0)
    flags, size = ctypes.c_uint(AT_RECURSIVE), ctypes.c_size_t(len(attributes))
    done = libc.syscall(
        MOUNT_SETATTR, AT_FDCWD, target.encode(), flags, attributes, size
    )
    checked(f"mount_setattr {target}", done)


def _private_root(paths: Sequence[str], links: dict[str, str]) -> None:
    """Change to a root with only these paths: a tmpfs with bind mounts, as in bubblewrap."""
    # Mounts made here must not appear outside.
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    os.mkdir("/tmp/old")
    os.mkdir("/tmp/new")
    # `pivot_root` moves the root itself, so that no path leads back to the old one.
    pivot = PIVOT_ROOT[machine()]
    checked("pivot_root", libc.syscall(pivot, b"/tmp", b"/tmp/old"))
    os.chdir("/")
    mount("tmpfs", "/new", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    for path in paths:
        source, target = f"/old{path}", Path(f"/new{path}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir(exist_ok=True) if os.path.isdir(source) else target.touch()
        # Bound first, then made read-only: a bind mount takes its flags in a second
        # step.
        mount(source, str(target), None, MS_BIND | MS_REC)
        make_read_only(str(target))
    for path, to in links.items():
        if not os.path.lexists(f"/new{path}"):
            Path(f"/new{path}").parent.mkdir(parents=True, exist_ok=True)
            os.symlink(to, f"/new{path}")
    os.chdir("/new")
    # Detached: the old root is gone once nothing uses it.
    checked("umount", libc.umount2(b"/old", MNT_DETACH))
    checked("pivot_root", libc.syscall(pivot, b".", b"."))
    checked("umount", libc.umount2(b".", MNT_DETACH))
    os.chdir("/")
    make_read_only("/")


def _become_ordinary(number: int) -> None:
    """Change from root to a user that nobody else has, so that its processes are counted separately."""
    # The user namespace may have few numbers.
    for user in (FIRST_USER + number, NOBODY):
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            return
        except OSError as error:
            # This user namespace does not have the number.
            refused = error
    raise refused


def _drop_capabilities() -> None:
    # _LINUX_CAPABILITY_VERSION_3, this thread.
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    checked("capset", libc.syscall(CAPSET[machine()], header, none))


def _landlock(paths: Sequence[str]) -> None:
    rules = struct.pack("Q", LANDLOCK_ALL)
    ruleset = checked(
        "landlock",
        # Everything that the rules below do not allow is denied.
        libc.syscall(LANDLOCK_CREATE, rules, ctypes.c_size_t(len(rules)), 0),
    )
    for path in paths:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        access = LANDLOCK_READ_FILE | (LANDLOCK_READ_DIR if os.path.isdir(path) else 0)
        # The rule refers to the open folder, and so also to everything below it.
        rule = struct.pack("=Qi", access, place)
        checked(f"landlock {path}", libc.syscall(LANDLOCK_ADD, ruleset, 1, rule, 0))
        os.close(place)
    checked("landlock", libc.syscall(LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)
