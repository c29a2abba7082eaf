"""Machine of its own for shell commands: `python -sSP machine.py`.

Commands see this machine's programs read-only, an empty writable root in memory, and no
processes, files or environment variables of the run. They are root there, and nobody
outside. It takes the place of a container where there is no container engine.

The first line of its input has the settings, every further line a command, and each
command gets one line of answer, in the order in which the commands end:

    {"size_mb": 1024, "network": true, "read_only": ["/srv/python"]}      -->
                                                       <--  {"ready": true}
    {"id": 1, "command": "ls", "cwd": "/", "env": {}, "seconds": 9.0,
     "input": ""}                                                         -->
                     <--  {"id": 1, "code": 0, "output": "...", "errors": "", "timed_out": false}
    {"id": 1, "cancel": true}: kill the command                           -->

Input and output are base64. Programs that a command leaves running go on until the
machine ends, which is when its input does.

The boundary is made of user, mount, process, IPC and host-name namespaces, and a network
namespace without `network`. There is no filter of system calls and no limit of memory
or processor time: it keeps a policy's commands off the run's files, and is no wall
against attacks on the kernel.
"""

from __future__ import annotations

import base64
import fcntl
import json
import math
import os
import resource
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

if __name__ == "__main__":
    sys.path.insert(
        0, os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
    )

from megaverl.processes import end_with_parent
from megaverl.rewards.sandbox.confinement import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    MNT_DETACH,
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    PIVOT_ROOT,
    checked,
    libc,
    machine,
    make_read_only,
    mount,
)

MS_NOEXEC = 8
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# What programs read of /etc. The rest of it may hold secrets.
CONFIGURATION = (
    "alternatives",
    "bash.bashrc",
    "ca-certificates",
    "debian_version",
    "group",
    "hosts",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "nsswitch.conf",
    "os-release",
    "passwd",
    "profile",
    "protocols",
    "resolv.conf",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
)
FOLDERS = ("home", "opt", "root", "run", "srv", "var/lib", "var/log", "var/tmp")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
VARIABLES = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "USER": "root",
}
# ioctl(2): SIOCGIFFLAGS, SIOCSIFFLAGS; the flag IFF_UP.
GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1
# Those of Docker: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP,
# NET_BIND_SERVICE, NET_RAW, SYS_CHROOT, MKNOD, AUDIT_WRITE, SETFCAP.
CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)
NOT_FOUND = 127  # code of a command that cannot be started, as in a shell
MAX_OUTPUT = 64 * 2**20  # bytes of a command's output that are returned


def serve() -> None:
    """Make the machine, and run commands in it until standard input ends."""
    lines = Lines(sys.stdin.fileno())
    while not (first_lines := lines.read()):
        pass
    if first_lines[0] is None:
        return
    setting = json.loads(first_lines[0])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: Mapping[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        enter(network=setting["network"])
        make_root(setting["size_mb"], setting["read_only"])
        # The kernel lets it mount /proc only while another one can be seen.
        first = start_first_process()
        leave_old_root()
        drop_capabilities()
        largest = setting["size_mb"] * 2**20
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    except OSError as error:
        answer({"error": f"{error}"})
        return
    answer({"ready": True})
    serve_commands(lines, first_lines[1:], answer)
    # Its end ends all that runs in the machine.
    os.kill(first, signal.SIGKILL)
    # The kernel waits with it until this process has reaped the commands that it ended.
    with suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)


class Lines:
    """Lines of a file descriptor, read without blocking longer than one read."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._rest = b""

    def read(self) -> list[bytes | None]:
        """Read once, and return the lines that are whole now. None: the end."""
        data = os.read(self.descriptor, 1 << 20)
        if not data:
            return [None]
        *whole, self._rest = (self._rest + data).split(b"\n")
        return list(whole)


def serve_commands(
    lines: Lines,
    first: Sequence[bytes | None],
    answer: Callable[[Mapping[str, Any]], None],
) -> None:
    """Run the commands that arrive, side by side, and answer each when it has ended. Returns when the input ends.

    One thread waits for all: a process whose children are in another process namespace
    cannot start threads.
    """
    running: dict[int, Command] = {}
    selector = selectors.DefaultSelector()
    selector.register(lines.descriptor, selectors.EVENT_READ)

    def take(line: bytes) -> None:
        request = json.loads(line)
        number = request["id"]
        if request.get("cancel"):
            if number in running:
                running[number].kill()
            return
        try:
            command = Command(request)
        except (OSError, ValueError) as error:
            answer({"id": number, **_result(NOT_FOUND, b"", str(error).encode())})
            return
        running[number] = command
        selector.register(command.descriptor, selectors.EVENT_READ, number)

    for line in first:
        if line is None:
            return
        take(line)
    while True:
        seconds = min(
            (each.seconds_left() for each in running.values()), default=math.inf
        )
        for key, _ in selector.select(None if math.isinf(seconds) else seconds):
            if key.data is not None:
                selector.unregister(key.fd)
                answer({"id": key.data, **running.pop(key.data).result()})
                continue
            for line in lines.read():
                if line is None:
                    return
                take(line)
        for command in running.values():
            if command.seconds_left() <= 0:
                command.time_out()


def enter(*, network: bool) -> None:
    """Move into new namespaces. Only processes that are started from now on are in the new process namespace.

    This process is not, so that no command can see, trace or kill it.

    Raises:
        OSError: the kernel or the container refuses it.
    """
    user, group = os.getuid(), os.getgid()
    starter = os.getppid()
    flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS
    checked("unshare", libc.unshare(flags if network else flags | CLONE_NEWNET))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {user} 1"),
        ("gid_map", f"0 {group} 1"),
    ):
        Path(f"/proc/self/{name}").write_text(text, encoding="ascii")
    # The kernel clears this setting when the user changes.
    end_with_parent(starter)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not network:
        _start_loopback()


def start_first_process() -> int:
    """Start process 1 of the machine, which waits for programs whose parents have ended, and return its number.

    Raises:
        OSError: /proc cannot be mounted there.
    """
    reading, writing = os.pipe()
    if child := os.fork():
        os.close(writing)
        with os.fdopen(reading) as report:
            problem = report.read()
        if problem:
            raise OSError(problem)
        return child
    os.close(reading)
    # PR_SET_PDEATHSIG. The parent is outside, so its number cannot be checked here.
    libc.prctl(1, signal.SIGKILL)
    try:
        # A mount of proc shows the processes of the namespace that mounts it.
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    except OSError as error:
        os.write(writing, str(error).encode())
        os._exit(1)
    # Commands could write answers to these.
    os.closerange(0, 256)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            signal.sigtimedwait([signal.SIGCHLD], 1.0)


def drop_capabilities() -> None:
    """Leave commands the capabilities that containers have. The rest would let them trace process 1, or mount."""
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text(encoding="ascii"))
    for number in set(range(last + 1)) - set(CAPABILITIES):
        # PR_CAPBSET_DROP.
        checked("prctl", libc.prctl(24, number, 0, 0, 0))


def _start_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh22x", b"lo", 0)
        _, flags = struct.unpack("16sh22x", fcntl.ioctl(control, GET_FLAGS, request))
        fcntl.ioctl(control, SET_FLAGS, struct.pack("16sh22x", b"lo", flags | UP))


def make_root(size_mb: int, read_only: Sequence[str]) -> None:
    """Change to a root in memory with this machine's programs and these folders, read-only. The old one is at /old.

    Raises:
        OSError: a mount is refused, or a folder is missing.
    """
    # Mounts made here must not appear outside.
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    data = f"mode=755,size={size_mb}m"
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, data)
    os.mkdir("/tmp/old")
    pivot = PIVOT_ROOT[machine()]
    checked("pivot_root", libc.syscall(pivot, b"/tmp", b"/tmp/old"))
    os.chdir("/")
    for path in [
        *filter(lambda path: os.path.lexists(f"/old{path}"), SYSTEM),
        *read_only,
    ]:
        _add_system(path)
    for name in CONFIGURATION:
        _copy(f"/old/etc/{name}", f"/etc/{name}")
    for name in (*FOLDERS, "proc", "dev/pts", "dev/shm", "tmp"):
        os.makedirs(f"/{name}", exist_ok=True)
    for name in ("tmp", "var/tmp", "dev/shm"):
        os.chmod(f"/{name}", 0o1777)
    for name in DEVICES:
        Path(f"/dev/{name}").touch()
        mount(f"/old/dev/{name}", f"/dev/{name}", None, MS_BIND)
    mount(
        "devpts",
        "/dev/pts",
        "devpts",
        MS_NOSUID | MS_NOEXEC,
        "newinstance,ptmxmode=0666",
    )
    for name, target in (
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ):
        os.symlink(target, f"/dev/{name}")


def leave_old_root() -> None:
    """Give up the view of the old root.

    Raises:
        OSError: the kernel refuses it.
    """
    # Detached: the old root is gone once nothing uses it.
    checked("umount", libc.umount2(b"/old", MNT_DETACH))
    os.rmdir("/old")


def _add_system(path: str) -> None:
    """Show a folder of the old root read-only. A link stays a link."""
    source = f"/old{path}"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
        return
    os.makedirs(path, exist_ok=True)
    # Bound first, then made read-only: a bind mount takes its flags in a second step.
    mount(source, path, None, MS_BIND | MS_REC)
    make_read_only(path)


def _copy(source: str, target: str) -> None:
    """Copy a file or folder of the old root, as far as it can be read."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with suppress(OSError, shutil.Error):
        if os.path.isdir(source) and not os.path.islink(source):
            shutil.copytree(source, target, symlinks=True)
        else:
            shutil.copy2(source, target, follow_symlinks=False)


class Command:
    """One command in the machine, which bash runs in a session of its own.

    Args:
        request: see the module.

    Attributes:
        descriptor: becomes readable when the command has ended.

    Raises:
        OSError: it cannot be started, for example as its folder is missing.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        seconds = request.get("seconds")
        self._deadline = math.inf if seconds is None else time.monotonic() + seconds
        self._timed_out = False
        # Files, not pipes: a program that goes on in the background would keep a pipe
        # open. They are not in the machine's root, which a program may have filled.
        self._output, self._errors = _file("output"), _file("errors")
        with _file("input") as given:
            given.write(base64.b64decode(request.get("input") or ""))
            given.seek(0)
            self._process = subprocess.Popen(
                ["/bin/bash", "-c", request["command"]], stdin=given, stdout=self._output, stderr=self._errors,
                cwd=request.get("cwd") or "/", env={**VARIABLES, **(request.get("env") or {})},
                start_new_session=True,
            )  # fmt: skip
        self.descriptor = os.pidfd_open(self._process.pid)

    def seconds_left(self) -> float:
        """Return the time until the command takes too long; infinite if it may take any, or is being killed."""
        return math.inf if self._timed_out else self._deadline - time.monotonic()

    def time_out(self) -> None:
        """Kill a command that takes too long."""
        self._timed_out = True
        self.kill()

    def kill(self) -> None:
        """Kill the command, and the programs of its session."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def result(self) -> dict[str, Any]:
        """Return the answer of a command that has ended, without its `id`."""
        code = self._process.wait()
        os.close(self.descriptor)
        with self._output as output, self._errors as errors:
            output.seek(0)
            errors.seek(0)
            return _result(
                code,
                output.read(MAX_OUTPUT),
                errors.read(MAX_OUTPUT),
                timed_out=self._timed_out,
            )


def _file(name: str) -> BinaryIO:
    return os.fdopen(os.memfd_create(name), "w+b")


def _result(
    code: int, output: bytes, errors: bytes, *, timed_out: bool = False
) -> dict[str, Any]:
    return {
        "code": code,
        "output": base64.b64encode(output).decode("ascii"),
        "errors": base64.b64encode(errors).decode("ascii"),
        "timed_out": timed_out,
    }


if __name__ == "__main__":
    serve()
