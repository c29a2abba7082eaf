"""The launch scripts: they run the real command, alone and as two agents of one job."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megaverl.errors import MISTAKE, SAVED_AND_LEFT
from megaverl.processes import ending_with_parent
from tests.cli import slurm_shims

LAUNCH = Path(__file__).parents[2] / "launch"
SCRIPTS = sorted(LAUNCH.glob("train_*.sh"))
ENVIRONMENT = {
    **{
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    },
    "MEGAVERL_PYTHON": sys.executable,
}
FT_LAUNCHER = "nvidia_resiliency_ext.fault_tolerance.launcher"
DRY = [
    "--dry-run",
    "--no-file-checks",
    "model.path=m",
    "data.train=t.jsonl",
    "reward=gsm8k",
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_right_bash_and_can_be_run(script):
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert os.access(script, os.X_OK)


def test_one_node(tmp_path):
    done = subprocess.run(
        [LAUNCH / "train_one_node.sh", *DRY],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("train: the configuration is good: 1 rank")


def test_two_nodes(tmp_path):
    """Two agents on this machine: both end well, and only rank 0 of the four prints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agents = [
        subprocess.Popen(
            ending_with_parent(
                [str(LAUNCH / "train_multi_node.sh"), *DRY, "actor.tp=4"]
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={
                **ENVIRONMENT,
                "NNODES": "2",
                "NODE_RANK": str(node),
                "NPROC": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
        )
        for node in range(2)
    ]
    outputs = [agent.communicate(timeout=300) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert [out.count("the configuration is good") for out, _ in outputs] == [1, 0]


@pytest.mark.parametrize("missing", ["NNODES", "NODE_RANK", "MASTER_ADDR"])
def test_what_several_nodes_must_be_told(missing, tmp_path):
    given = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "host0"}
    del given[missing]
    done = subprocess.run(
        [LAUNCH / "train_multi_node.sh"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**ENVIRONMENT, **given},
    )
    assert done.returncode == 2
    assert f"set {missing}." in done.stderr


@pytest.mark.parametrize("launcher", ["torchrun", "ft_launcher"])
def test_nodes_that_come_and_go(launcher, tmp_path):
    """NNODES=MIN:MAX needs no number of the node: the rendezvous counts."""
    given = {
        "NNODES": "2:3",
        "MASTER_ADDR": "host0",
        "MAX_RESTARTS": "4",
        "JOB_ID": "17",
        "LAUNCHER": launcher,
    }
    environment = {
        **ENVIRONMENT,
        **slurm_shims.write(tmp_path),
        **given,
        "SLURMD_NODENAME": "node",
    }
    command = [LAUNCH / "train_multi_node.sh", "--config", "run.yaml"]
    assert subprocess.run(command, cwd=tmp_path, env=environment).returncode == 0
    module = {"torchrun": "megaverl.trainer.elastic_agent"}.get(launcher, FT_LAUNCHER)
    own = "" if launcher == "torchrun" else "--ft-log-level INFO "
    assert " ".join(nodes_of(tmp_path)["node"]) == (
        f"-m {module} --nnodes 2:3 --nproc-per-node 8 --max-restarts 4 --rdzv-backend c10d "
        f"--rdzv-endpoint host0:29500 --rdzv-id 17 --rdzv-conf join_timeout=600 {own}"
        "-m megaverl.cli.main train --config run.yaml"
    )
    wrong = subprocess.run(
        command,
        env={**environment, "LAUNCHER": "mpirun"},
        capture_output=True,
        text=True,
    )
    assert wrong.returncode == 2 and "it is torchrun or ft_launcher" in wrong.stderr


def slurm(tmp_path, *arguments, **environment):
    """`sbatch launch/train_slurm_roles.sh` where SLURM's commands are shims, 16 nodes in four groups; running."""
    given = {**ENVIRONMENT, **slurm_shims.write(tmp_path), **environment}
    given["PATH"] = f"{tmp_path}:{given['PATH']}"
    command = ["sbatch", "launch/train_slurm_roles.sh", *arguments]
    pipe = subprocess.PIPE
    command = ending_with_parent(command)
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, cwd=LAUNCH.parent, env=given
    )


def nodes_of(tmp_path):
    """What every node was started with, by its name."""
    files = [path for path in tmp_path.glob("node.*") if path.suffix != ".part"]
    return {path.name.removeprefix("node."): path.read_text().split() for path in files}


def test_groups_of_nodes_under_slurm(tmp_path):
    """Each node is told its own number, the first node's name, and what it is; the arguments arrive in one piece."""
    job = slurm(tmp_path, "--config", "run.yaml", "trainer.steps=3")
    assert job.wait(timeout=300) == 0, job.communicate()
    found = nodes_of(tmp_path)
    roles = {
        0: ("train", 8),
        1: ("rollout", 5),
        2: ("reward,critic", 2),
        3: ("coordinator", 1),
    }
    names = [
        f"group{group}-{node + 1}"
        for group, (_, count) in roles.items()
        for node in range(count)
    ]
    assert sorted(found) == sorted(names) and len(names) == 16
    for number, name in enumerate(names):
        role = roles[int(name[5])][0]
        processes = "1" if role == "coordinator" else "8"
        assert " ".join(found[name]) == (
            f"-m megaverl.trainer.elastic_agent --nnodes 16 --node-rank {number} --nproc-per-node {processes} "
            "--master-addr group0-1 --master-port 24711 --rdzv-conf timeout=600 --max-restarts 0 "
            f"-m megaverl.cli.main train --role {role} --config run.yaml trainer.steps=3"
        )
    assert not (tmp_path / "scontrol.log").exists(), "nothing is to be done again"
    assert (tmp_path / "cores.log").read_text().split() == ["--cpu-bind=none"] * 4, (
        "else one core for all of a node"
    )
    assert "srun --cpu-bind=none" in (LAUNCH / "train_slurm.sh").read_text()


def test_a_job_under_slurm_leaves_and_is_queued_again(tmp_path):
    """Before its time is over SLURM signals the script; all nodes hear it, and leave with 75."""
    (tmp_path / "hold").touch()
    job = slurm(tmp_path)
    try:
        while len(nodes_of(tmp_path)) < 16 and job.poll() is None:
            time.sleep(0.02)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=300) == 75
    finally:
        (tmp_path / "hold").unlink()
    assert (tmp_path / "scontrol.log").read_text() == "requeue 4711\n"


def test_containers_under_slurm(tmp_path):
    """Each of the four groups' steps gets the image, and sees the repository under its own name."""
    assert (
        slurm(
            tmp_path,
            CONTAINER_IMAGE="/images/megaverl.sqsh",
            CONTAINER_MOUNTS="/data:/data",
        ).wait(timeout=300)
        == 0
    )
    root = LAUNCH.parent
    one = [
        "image=/images/megaverl.sqsh",
        f"mounts={root}:{root},/data:/data",
        f"workdir={root}",
    ]
    found = (tmp_path / "container.log").read_text().split()
    assert sorted(found) == sorted(4 * [f"--container-{option}" for option in one])
    assert len(nodes_of(tmp_path)) == 16


def test_a_job_of_kubernetes(tmp_path):
    """What a pod runs starts the agent of its node; the Service gives the first pod the name that all look for."""
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes" / "job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    nodes = str(job["spec"]["completions"])
    given = {entry["name"]: entry.get("value", "1") for entry in container["env"]}
    assert given["NNODES"] == nodes == str(job["spec"]["parallelism"])
    assert (
        given["MASTER_ADDR"]
        == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    )
    assert pod["subdomain"] == service["metadata"]["name"]
    codes = [
        rule["onExitCodes"]["values"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    ]
    assert codes == [[MISTAKE], [SAVED_AND_LEFT]]
    environment = {
        **ENVIRONMENT,
        **slurm_shims.write(tmp_path),
        **given,
        "SLURMD_NODENAME": "pod",
    }
    command = [*container["command"], *container["args"]]
    assert subprocess.run(command, cwd=LAUNCH.parent, env=environment).returncode == 0
    assert (
        nodes_of(tmp_path)["pod"]
        == (
            f"-m megaverl.trainer.elastic_agent --nnodes {nodes} --node-rank 1 --nproc-per-node 8 --master-addr "
            "megaverl-0.megaverl --master-port 29500 --rdzv-conf timeout=600 --max-restarts 0 "
            "-m megaverl.cli.main train"
        ).split()
        + container["args"]
    )


def test_the_image_is_made_of_what_is_here():
    """Each file that docker/Dockerfile copies is in the repository, and it installs locks that there are."""
    root = LAUNCH.parent
    text = (root / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    copied = [
        words[1:-1]
        for words in map(str.split, text.splitlines())
        if words[:1] == ["COPY"]
    ]
    for name in [
        name for names in copied for name in names if not name.startswith("--from")
    ]:
        assert name.startswith("/srv") or (root / name).exists(), name
    (locks,) = [
        line.split("--gpu")[1].split()
        for line in text.splitlines()
        if line.startswith("RUN ./launch/bootstrap")
    ]
    assert locks and all(
        (root / "requirements" / f"{name}.lock").exists()
        for name in [*locks, "cuda-py312"]
    )
    assert text.count("FROM ${BASE_IMAGE}") == 2 and text.index(
        "ARG BASE_IMAGE="
    ) < text.index("FROM")


def test_what_goes_wrong_under_slurm(tmp_path):
    (tmp_path / "fails.group1-3").touch()
    assert slurm(tmp_path).wait(timeout=300) == 1
    assert not (tmp_path / "scontrol.log").exists(), "a failed job is not queued again"
    job = slurm(tmp_path, ROLES="train rollout")
    assert (
        job.wait(timeout=300) == 2
        and "4 groups of nodes for 2 roles (ROLES=train rollout)" in job.stderr.read()
    )
