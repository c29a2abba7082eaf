"""Environment of Harbor that runs a task's commands on this machine, in namespaces of their own.

It needs no container engine and no image: commands see this machine's programs, and an
empty root in memory (`megaverl/rewards/sandbox/machine.py`, which runs as a process).
Of a task's Dockerfile it does what does not need an image: ENV, WORKDIR, COPY from the
task's own folder, and RUN. `harbor_worker.py` imports it under Harbor's interpreter.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import shlex
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.environments.base import (
    BaseEnvironment,
    ExecResult,
    SandboxBuildFailedError,
    transfer_tar_filter,
)
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.task.config import NetworkMode

# Command that starts a machine; `harbor_worker.py` sets it.
COMMAND: list[str] = []
TYPE = "namespaces"
TIMED_OUT = 124  # exit code of a command that took too long, as of timeout(1)
# Instructions of a Dockerfile that say nothing about the machine's files.
IGNORED = ("FROM", "LABEL", "CMD", "ENTRYPOINT", "EXPOSE", "MAINTAINER", "STOPSIGNAL")
LINE_LIMIT = 1 << 30


class TaskRefused(Exception):
    """Raised for a task that needs more than this environment has."""


class MachineEnvironment(BaseEnvironment):
    """A machine in namespaces.

    Args:
        size_mb: most MiB of the files of a trial, which are in memory.
        read_only: further folders of this machine that commands see, such as an installation of Python.
    """

    def __init__(
        self,
        *args: Any,
        size_mb: int = 1024,
        read_only: list[str] | None = None,
        network_policy: Any = None,
        **kwargs: Any,
    ) -> None:
        self._size_mb, self._read_only = size_mb, list(read_only or ())
        mode = network_policy.network_mode if network_policy is not None else None
        self._has_network = mode is not NetworkMode.NO_NETWORK
        self._directory: str | None = None
        self._variables: dict[str, str] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading: asyncio.Task[None] | None = None
        super().__init__(*args, network_policy=network_policy, **kwargs)

    @staticmethod
    def type() -> str:
        return TYPE

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        """Accept any task; `start` reads its Dockerfile."""

    async def start(self, force_build: bool) -> None:
        """Make the machine, and do what the task's Dockerfile says.

        Raises:
            TaskRefused: the machine cannot be made here, or the task needs a container.
            SandboxBuildFailedError: a command of the Dockerfile fails.
        """
        if (self.environment_dir / "docker-compose.yaml").exists():
            raise TaskRefused(
                f"{self.environment_dir} has a docker-compose.yaml, and environment {TYPE!r} has no services. "
                "Use docker or a cloud."
            )
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *COMMAND, stdin=pipe, stdout=pipe, limit=LINE_LIMIT
        )
        setting = {
            "size_mb": self._size_mb,
            "network": self._has_network,
            "read_only": self._read_only,
        }
        self._send(setting)
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        ready = json.loads(line) if line else {"error": "it has ended"}
        if "error" in ready:
            raise TaskRefused(
                f"environment {TYPE!r} cannot be made here: {ready['error']}. It needs user namespaces, which "
                "containers often refuse. Use docker or a cloud."
            )
        self._reading = asyncio.create_task(self._read_answers())
        dockerfile = self.environment_dir / "Dockerfile"
        if dockerfile.exists():
            for name, rest in instructions(dockerfile.read_text(encoding="utf-8")):
                await self._do(name, rest, dockerfile)
        await self.ensure_dirs(self._mount_targets())

    async def _do(self, name: str, rest: str, dockerfile: Path) -> None:
        """Carry out one instruction of a Dockerfile."""
        if name in IGNORED:
            return
        if name == "ENV":
            pairs = shlex.split(rest)
            if "=" in pairs[0]:
                self._variables |= dict(pair.split("=", 1) for pair in pairs)
            else:
                self._variables[pairs[0]] = rest.split(None, 1)[1]
        elif name == "WORKDIR":
            directory = PurePosixPath(self._directory or "/") / rest
            self._directory = str(directory)
            await self._checked(f"mkdir -p {shlex.quote(self._directory)}")
        elif name == "COPY" and not rest.startswith(("-", "[")):
            *sources, target = shlex.split(rest)
            await self._copy(sources, target, dockerfile)
        elif name == "RUN" and not rest.startswith(("--", "[", "<<")):
            result = await self.exec(rest)
            if result.return_code:
                raise SandboxBuildFailedError(
                    f"{dockerfile}: RUN {rest:.80} ended with {result.return_code}: {(result.stderr or '')[-400:]}"
                )
        else:
            raise TaskRefused(
                f"{dockerfile}: {name} {rest:.80} needs an image, which environment {TYPE!r} does not build. Use "
                "docker or a cloud."
            )

    async def _copy(self, sources: list[str], target: str, dockerfile: Path) -> None:
        into = str(PurePosixPath(self._directory or "/") / target)
        for source in sources:
            path = (self.environment_dir / source.lstrip("/")).resolve()
            if not path.is_relative_to(self.environment_dir.resolve()):
                raise TaskRefused(f"{dockerfile}: COPY {source} is not of the task")
            if not path.exists():
                raise TaskRefused(f"{dockerfile}: there is no {source} to COPY")
            if path.is_dir():
                await self.upload_dir(path, into)
            else:
                is_folder = target.endswith(("/", ".")) or len(sources) > 1
                place = f"{into}/{path.name}" if is_folder else into
                await self.upload_file(path, place)

    async def stop(self, delete: bool) -> None:
        """End the machine with all that runs in it. Its files are gone with it."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            await self._reading

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command as the machine's root, its only user.

        Raises:
            TaskRefused: another user is asked for.
            RuntimeError: the machine has ended.
        """
        user = user if user is not None else self.default_user
        if user not in (None, "root", 0, "0"):
            raise TaskRefused(
                f"the task runs commands as the user {user!r}, and environment {TYPE!r} has only root. Use docker or "
                "a cloud."
            )
        answer = await self._ask(
            command=command,
            cwd=cwd or self.task_env_config.workdir or self._directory,
            env={**self._variables, **(self._merge_env(env) or {})},
            seconds=timeout_sec,
        )
        output, errors = (
            base64.b64decode(answer[name]).decode("utf-8", errors="replace")
            for name in ("output", "errors")
        )
        callback = self._output_callback()
        if callback is not None and output:
            await callback(output, "stdout")
        if callback is not None and errors:
            await callback(errors, "stderr")
        code = TIMED_OUT if answer["timed_out"] else answer["code"]
        return ExecResult(stdout=output, stderr=errors, return_code=code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        path = shlex.quote(target_path)
        mode = Path(source_path).stat().st_mode & 0o777
        await self._checked(
            f'mkdir -p "$(dirname {path})" && cat > {path} && chmod {mode:o} {path}',
            Path(source_path).read_bytes(),
        )

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(source_dir, arcname=".")
        path = shlex.quote(target_dir)
        await self._checked(
            f"mkdir -p {path} && tar -x --no-same-owner -f - -C {path}",
            packed.getvalue(),
        )

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        data = await self._checked(f"cat {shlex.quote(source_path)}")
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        Path(target_path).write_bytes(data)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        # Packed in the machine, and unpacked without what leads out of the folder: a
        # policy may have written any link.
        data = await self._checked(f"tar -c -f - -C {shlex.quote(source_dir)} .")
        Path(target_dir).mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(target_dir, filter=_filter)

    async def _checked(self, command: str, data: bytes = b"") -> bytes:
        """Run a command and return its output.

        Raises:
            RuntimeError: it fails.
        """
        answer = await self._ask(
            command=command, input=base64.b64encode(data).decode("ascii")
        )
        if answer["code"]:
            errors = base64.b64decode(answer["errors"]).decode(errors="replace")
            raise RuntimeError(f"{command:.80} ended with {answer['code']}: {errors}")
        return base64.b64decode(answer["output"])

    async def _ask(self, **request: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answered: asyncio.Future[dict[str, Any]]
        answered = asyncio.get_running_loop().create_future()
        self._waiting[number] = answered
        self._send({"id": number, **request})
        try:
            return await answered
        except asyncio.CancelledError:
            self._send({"id": number, "cancel": True})
            raise
        finally:
            self._waiting.pop(number, None)

    def _send(self, value: Any) -> None:
        if self._process is None or self._process.returncode is not None:
            raise RuntimeError("the machine has ended")
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value).encode() + b"\n")

    async def _read_answers(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            answered = self._waiting.get(answer["id"])
            if answered is not None and not answered.done():
                answered.set_result(answer)
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(RuntimeError("the machine has ended"))


def _filter(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    """Return a member of an archive that may be unpacked, or None to leave it out."""
    try:
        allowed: tarfile.TarInfo | None = transfer_tar_filter(member, path)
        return allowed
    except tarfile.FilterError:
        return None


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile as pairs of a name in capitals and the rest."""
    joined = dockerfile.replace("\\\n", " ")
    lines = (line.strip() for line in joined.splitlines())
    parts = [line.split(None, 1) for line in lines if line and not line.startswith("#")]
    return [
        (part[0].upper(), part[1].strip() if len(part) > 1 else "") for part in parts
    ]
