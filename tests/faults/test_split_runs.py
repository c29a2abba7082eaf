"""Roles on ranks of their own: the numbers of a run in which they share them; after faults, and over networks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megaverl.checkpoint import newest_first
from megaverl.checkpoint.choice import is_finished
from megaverl.processes import ending_with_parent
from megaverl.trainer.islands import island_file
from megaverl.trainer.partial_rollouts import PARTIAL_FILE
from megaverl.trainer.waiting_samples import file_of
from tests.faults.injector import Fault
from tests.faults.networks import networks, why_not
from tests.faults.runs import differences, metrics, remains
from tests.launcher import Ended, Launcher
from tests.trainer.conftest import ROOT, command_arguments, environment

STEPS = 5
PPO = [
    "rollout.engine=hf",
    # of what is drawn in two ways, every role must know which
    "rollout={adaptive_sampling: true, sampling_rules: [{under: 6, temperature: 0}, {temperature: 0.7, top_k: 9}]}",
    "algorithm={name: ppo, num_mini_batches: 2, kl: {in: reward, kind: k1, coef: 0.01, target: 0.01}}",
    "algorithm.bootstrap_truncated=true",
    "actor={tp: 1, optimizer: {lr: 1.0e-3}, scheduler: {lr_decay_style: cosine, lr_warmup_steps: 1}}",
    "critic={optimizer: {lr: 1.0e-3}}",
    f"trainer={{steps: {STEPS}, validate_every: 3}}",
    "checkpoint={save_interval: 2, keep_last_k: 9}",
    "run={name: run, log_with: jsonl, timeout_minutes: 0.4}",
]
FIVE = "placement={rollout: 0, reward: 1, critic: 2, actor: 3, reference: actor, coordinator: 4}"
ASYNC = [
    "rollout={async_rollout: true, max_staleness: 2}",
    "trainer.validate_every=0",
    "checkpoint.save_interval=3",
]
# What only a run of several worlds has, or what depends on the way that weights take.
OWN = ("busy/", "reshard/bytes", "rollout/staleness", "queue/", "dataflow/")


def run(
    launch: Launcher,
    inputs: Path,
    runs: Path,
    ranks: int,
    *more: str,
    fault: Fault | None = None,
) -> Ended:
    arguments = [*command_arguments(inputs, runs), *data(inputs), *PPO, *more]
    given = fault.environment() if fault else {}
    return launch.command(
        ["train", *arguments], logs=runs / "output", ranks=ranks, environment=given
    )


def data(inputs: Path) -> list[str]:
    """Prompts of two lengths to train on."""
    return [
        f"data.train={inputs / 'lengths.jsonl'}",
        f"data.validation={inputs / 'held_out.jsonl'}",
    ]


def measured(runs: Path) -> list[dict[str, float]]:
    """What was measured, by record, without what several worlds alone have."""
    return [
        {name: value for name, value in record.items() if not name.startswith(OWN)}
        for record in metrics(runs / "run")
    ]


@pytest.fixture(scope="module")
def shared(
    launch: Launcher, inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The `runs` folder of a run with all roles on one rank."""
    runs = tmp_path_factory.mktemp("shared")
    ended = run(launch, inputs, runs, 1)
    assert ended.codes == [0], ended.text
    return runs


@pytest.fixture(scope="module")
def five(
    launch: Launcher, inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """... and of one with each on its own, and a rank that only coordinates."""
    runs = tmp_path_factory.mktemp("five")
    ended = run(launch, inputs, runs, 5, FIVE)
    assert ended.codes == [0] * 5, ended.text
    return runs


@pytest.fixture(scope="module")
def ahead(
    launch: Launcher, inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """... and of one whose engines work ahead of the actor."""
    runs = tmp_path_factory.mktemp("ahead")
    ended = run(launch, inputs, runs, 5, FIVE, *ASYNC)
    assert ended.codes == [0] * 5, ended.text
    return runs


def test_the_numbers_are_those_of_shared_ranks(shared: Path, five: Path) -> None:
    expected, found = measured(shared), measured(five)
    assert len(found) == len(expected) == STEPS + 3
    assert (
        max(record.get("rollout/logprob_diff_max", 0.0) for record in expected) < 1e-4
    )
    steps = [record for record in expected if "train/last_value_mean" in record]
    assert all(
        (record["train/last_value_mean"] != 0) == (n > 0)
        for n, record in enumerate(steps)
    ), "some are cut off"
    for before, after in zip(expected, found, strict=True):
        assert after.keys() == before.keys()
        assert after == pytest.approx(before, abs=1e-6, rel=1e-6)
    assert remains(five / "run")["samples"] == remains(shared / "run")["samples"]


def test_every_world_says_what_it_costs(five: Path) -> None:
    """Memory and busy time of each role, the wait for others, and what came with the weights: where it happened."""
    *_, record = (
        json.loads(line)
        for line in (five / "run" / "metrics.jsonl").read_text().splitlines()[:-1]
    )
    for role in ("rollout", "reward", "critic", "actor", "reference"):
        assert (
            record[f"memory/{role}_gpu_mem_mb"] > 1 and 0 < record[f"busy/{role}"] <= 1
        )
    assert record["reshard/bytes_received"] > 10_000 and record["time/reshard_ms"] > 0
    assert {
        "rollout/staleness",
        "train/tokens_per_sec",
        "time/wait_ms",
        "memory/process_rss_mb",
    } <= record.keys()


def test_nodes_that_say_what_they_are(
    launch: Launcher, inputs: Path, shared: Path, tmp_path: Path
) -> None:
    """Nobody trains by name: the actor is on the engines' nodes, and the run says who is where."""
    roles = ("rollout", "rollout", "reward", "critic", "coordinator")
    ended = launch.command(
        [
            "train",
            *command_arguments(inputs, tmp_path),
            *data(inputs),
            *PPO,
            "trainer.steps=1",
        ],
        logs=tmp_path / "output",
        ranks=5,
        on_rank={
            rank: {"GROUP_RANK": str(rank), "MEGAVERL_ROLE": role}
            for rank, role in enumerate(roles)
        },
    )
    assert ended.codes == [0] * 5, ended.text
    for line in (
        "critic       ranks 3 ",
        "actor shares the ranks of rollout: no node took it (--role train)",
    ):
        assert ended.text.count(line) == 1, ended.text
    first, expected = (
        next(each["reward/mean"] for each in measured(runs) if "reward/mean" in each)
        for runs in (tmp_path, shared)
    )
    assert first == pytest.approx(expected, abs=1e-6)


def test_grids_of_their_own(launch: Launcher, inputs: Path, tmp_path: Path) -> None:
    """Two engines on two ranks, an actor over two tensor-parallel ranks, a critic over two stages on the same."""
    grids = [
        "actor={tp: 2, optimizer: {lr: 1.0e-3}}",
        "critic={tp: 1, pp: 2, optimizer: {lr: 1.0e-3}}",
    ]
    together = run(launch, inputs, tmp_path / "together", 2, *grids)
    apart = run(
        launch,
        inputs,
        tmp_path / "apart",
        4,
        *grids,
        "placement={rollout: 0-1, actor: rest}",
    )
    assert together.codes == [0, 0] and apart.codes == [0] * 4, apart.text
    for before, after in zip(
        measured(tmp_path / "together"), measured(tmp_path / "apart"), strict=True
    ):
        assert after == pytest.approx(before, abs=1e-4, rel=1e-4)


def test_ranks_get_their_own_samples(
    launch: Launcher, inputs: Path, shared: Path, tmp_path: Path
) -> None:
    """Four data-parallel ranks of a role: the numbers of one; and fewer bytes come than where an operator reads all.

    The actor's first rank reads those that are written down as well: none here.
    """
    placed = ["placement={rollout: 0, actor: 1-4}", "trainer.save_samples=0"]
    reads_all = tmp_path / "reads_all.py"
    reads_all.write_text(
        "from megaverl.dataflow import Operator\n"
        "def add(flow):\n"
        "    flow.add_operator(Operator('looks', lambda rollouts: {}, ('rollouts',), (), role='actor'))\n"
    )
    own = run(launch, inputs, tmp_path / "own", 5, *placed)
    every = run(
        launch,
        inputs,
        tmp_path / "every",
        5,
        *placed,
        f"trainer.operators=['{reads_all}:add']",
    )
    assert own.codes == every.codes == [0] * 5, own.text + every.text
    for before, after in zip(measured(shared), measured(tmp_path / "own"), strict=True):
        assert after == pytest.approx(before, abs=1e-5, rel=1e-5)
    few, many = (metrics(tmp_path / name / "run")[2] for name in ("own", "every"))
    key = "dataflow/actor_bytes_received"
    assert 0 < few[key] < many[key]


def test_rollouts_ahead(
    launch: Launcher, inputs: Path, five: Path, ahead: Path, tmp_path: Path
) -> None:
    """No staleness allowed: to the bit the run that takes turns. Two steps: otherwise, and each sample says how old."""
    none = "rollout={engine: hf, async_rollout: true, max_staleness: 0}"
    assert run(launch, inputs, tmp_path, 5, FIVE, none).codes == [0] * 5
    expected, found = remains(five / "run"), remains(tmp_path / "run")
    assert measured(tmp_path) == measured(five)
    assert [
        part
        for part in ("weights", "state", "samples")
        if found[part] != expected[part]
    ] == []
    staleness = [
        record["rollout/staleness"]
        for record in metrics(ahead / "run")
        if "rollout/staleness" in record
    ]
    # after step 3 the run saves, and nobody is ahead
    assert staleness == [0.0, 1.0, 2.0, 0.0, 1.0]
    depth = [
        record["queue/depth"]
        for record in metrics(ahead / "run")
        if "queue/depth" in record
    ]
    assert depth == [8 * (steps + 1) for steps in staleness]
    events = json.loads((ahead / "run" / "timeline.json").read_text())["traceEvents"]
    scored = [
        event
        for event in events
        if event["name"] == "reward" and event["args"]["step"] == 1
    ]
    assert len(scored) == 8 + 1  # sample by sample, and what makes one of them
    assert {"wait", "rollout"} <= {
        event["name"] for event in events if event["pid"] == 0
    }
    late = remains(ahead / "run")
    assert late["weights"] != expected["weights"]
    # the coordinator, which knows the limit as well, found nothing too old: every
    # update was applied
    assert (
        late["trainer"]["coordinator"]["versions"]
        == late["trainer"]["coordinator"]["steps"]
        != {}
    )


def test_a_lost_rank_is_named_and_the_run_goes_on(
    launch: Launcher, inputs: Path, ahead: Path, tmp_path: Path
) -> None:
    """... to the bit what an undisturbed run ends with, though samples were under way."""
    fault = Fault("kill", 3, "actor_update", 4)
    ended = run(launch, inputs, tmp_path, 5, FIVE, *ASYNC, fault=fault)
    survivors = [code for rank, code in enumerate(ended.codes) if rank != fault.rank]
    assert survivors == [1] * 4, ended.text
    assert "rank 3 (actor+reference, " in ended.text
    # The controller or a rank that waits for it is the first to notice.
    assert (
        "was lost in actor.update: its process ended" in ended.text
        or "it was in step 4: actor_update" in ended.text
    )
    assert run(launch, inputs, tmp_path, 5, FIVE, *ASYNC).codes == [0] * 5
    assert differences(remains(tmp_path / "run"), remains(ahead / "run")) == []


ISLANDS = "placement={rollout: 0, actor: 1-2, coordinator: 3, actor_islands: 2}"


def test_islands_of_the_actor(
    launch: Launcher, inputs: Path, shared: Path, tmp_path: Path
) -> None:
    """Two islands on halves of every mini-batch, joined at every update: the single island's run."""
    ended = run(launch, inputs, tmp_path, 4, ISLANDS)
    assert ended.codes == [0] * 4, ended.text
    for before, after in zip(measured(shared), measured(tmp_path), strict=True):
        assert after == pytest.approx(before, abs=1e-5, rel=1e-5)
    expected, found = weights_of(shared / "run"), weights_of(tmp_path / "run")
    assert (
        max(float((found[name] - expected[name]).abs().max()) for name in expected)
        < 1e-6
    )


GLOBAL = "placement={rollout: 0, actor: 1-2, coordinator: 3-6, actor_islands: 2}"
AGGREGATES = "coordinator={aggregates: gradients, tp: 2, pp: 2}"


def test_a_global_model_on_the_coordinators_ranks(
    launch: Launcher, inputs: Path, shared: Path, tmp_path: Path
) -> None:
    """Four ranks hold actor and critic with their optimizers, and two islands send them
    gradients: the run of one world. Killed on either side, it goes on to the same bits.
    """
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    ended = run(launch, inputs, whole, 7, GLOBAL, AGGREGATES)
    assert ended.codes == [0] * 7, ended.text
    numbers_of_bytes: set[float] = set()
    for before, after in zip(measured(shared), measured(whole), strict=True):
        if "actor/grad_norm" in after:
            # Every step moves as many gradients and weights.
            numbers_of_bytes.add(after.pop("coordinator/bytes"))
        assert after == pytest.approx(before, abs=1e-5, rel=1e-5)
    assert len(numbers_of_bytes) == 1 and min(numbers_of_bytes) > 0
    expected, found = weights_of(shared / "run"), weights_of(whole / "run")
    assert (
        max(float((found[name] - expected[name]).abs().max()) for name in expected)
        < 1e-6
    )
    for rank, name in ((3, "islands"), (2, "critic_update")):
        fault = Fault("kill", rank, name, 4)
        codes = run(launch, inputs, cut, 7, GLOBAL, AGGREGATES, fault=fault).codes
        assert codes == [1] * rank + [-9] + [1] * (6 - rank)
        assert run(launch, inputs, cut, 7, GLOBAL, AGGREGATES).codes == [0] * 7
        assert differences(remains(cut / "run"), remains(whole / "run")) == []
        shutil.rmtree(cut)


# PPO whose updates are decided on one by one, and of which the critic's is not awaited.
PROGRAM = """
from megaverl.trainer.program import sample

async def step(run, step):
    rollouts, scores = await sample(run, step)
    signals = [run.actor.old_log_probs(rollouts, step), run.reference.log_probs(rollouts), run.critic.values(rollouts)]
    experience = await run.actor.advantages(rollouts, scores, [await signal for signal in signals])
    run.critic.update(rollouts, experience, step)
    is_updated = await run.actor.update(rollouts, experience, step)
    await run.actor.sync_weights(run.rollout, is_updated)
    return rollouts, scores
"""


def test_islands_in_a_program_of_the_user(
    launch: Launcher, inputs: Path, shared: Path, tmp_path: Path
) -> None:
    """The islands' gradients are summed and decided on in updates that a program of the user's calls."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = run(launch, inputs, tmp_path, 4, ISLANDS, f"trainer.program={program}:step")
    assert ended.codes == [0] * 4, ended.text
    expected, found = weights_of(shared / "run"), weights_of(tmp_path / "run")
    assert (
        max(float((found[name] - expected[name]).abs().max()) for name in expected)
        < 1e-6
    )


def test_islands_under_fsdp(
    launch: Launcher, inputs: Path, shared: Path, tmp_path: Path
) -> None:
    """Megatron's numbers on one rank; an engine elsewhere knows over how many ranks of a node its actor is cut."""
    placed = "placement={rollout: 0, actor: 1-4, coordinator: 5, actor_islands: 2}"
    ended = run(
        launch,
        inputs,
        tmp_path,
        6,
        placed,
        "actor.engine=fsdp",
        "actor.fsdp.sharding_strategy=hybrid_shard",
    )
    assert ended.codes == [0] * 6, ended.text
    for before, after in zip(measured(shared), measured(tmp_path), strict=True):
        assert after == pytest.approx(before, abs=1e-4, rel=1e-4)


def test_islands_on_ways_of_their_own(
    launch: Launcher, inputs: Path, tmp_path: Path
) -> None:
    """Three updates between meetings, rounded on the way: cut off and taken up again, to the same bits.

    The actor has adapters, and the critic trains every weight, both in bfloat16.
    """
    diloco = [
        "coordinator={islands_every: 3, islands_compress: bfloat16}",
        "model.dtype=bfloat16",
        "actor.lora.rank=4",
    ]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    ended = run(launch, inputs, whole, 4, ISLANDS, *diloco)
    assert ended.codes == [0] * 4, ended.text
    fault = Fault("kill", 2, "actor_update", 4)
    assert run(launch, inputs, cut, 4, ISLANDS, *diloco, fault=fault).codes == [
        1,
        1,
        -9,
        1,
    ]
    assert run(launch, inputs, cut, 4, ISLANDS, *diloco).codes == [0] * 4
    assert differences(remains(cut / "run"), remains(whole / "run")) == []
    [newest] = newest_first(whole / "run" / "checkpoints")[0][:1]
    for role in ("actor", "critic"):
        one, other = (
            load_file(newest / island_file(f"{role}{end}", rank))
            for end, rank in (("", 1), (".1", 2))
        )
        starts = [name for name in one if name.startswith("start.")]
        assert starts and all(torch.equal(one[name], other[name]) for name in starts), (
            "where they met last"
        )
        assert any((one[name].bfloat16() != one[name]).any() for name in starts), (
            "in float32"
        )
    moved = "placement={rollout: 0, actor: 2-3, coordinator: 1, actor_islands: 2}"
    ended = run(launch, inputs, whole, 4, moved, *diloco, "trainer.steps=6")
    assert (
        ended.codes == [1] * 4
        and f"{island_file('actor', 2)}: it is not there" in ended.text
    ), ended.text


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The exported model."""
    return {
        name: t
        for file in sorted((folder / "hf").glob("*.safetensors"))
        for name, t in load_file(file).items()
    }


def test_asked_to_leave(
    launch: Launcher, inputs: Path, ahead: Path, tmp_path: Path
) -> None:
    """One rank hears SIGTERM: all leave with the same code, and save what waits for training: it ends the same."""
    ended = run(
        launch, inputs, tmp_path, 5, FIVE, *ASYNC, fault=Fault("term", 1, "reward", 2)
    )
    assert ended.codes == [75] * 5, ended.text
    assert "SIGTERM: saved after 1 of 5 steps" in ended.text
    [saved] = (tmp_path / "run" / "checkpoints").glob("step_*")
    assert [path.name for path in sorted(saved.glob("ahead_*"))] == [
        file_of(1),
        file_of(2),
    ]
    # `checkpoint.resume: unfinished` goes on with it.
    assert not is_finished(saved)
    assert run(launch, inputs, tmp_path, 5, FIVE, *ASYNC).codes == [0] * 5
    assert differences(remains(tmp_path / "run"), remains(ahead / "run")) == ["kept"]


def test_weights_in_flight(launch: Launcher, inputs: Path, tmp_path: Path) -> None:
    """Engines take new weights in the middle of a step; a run that leaves just then goes on to the same bits."""
    three = "placement={rollout: 0, actor: 1, critic: 2}"
    more = [three, *ASYNC, "rollout={max_staleness: 1, in_flight_updates: true}"]
    untouched, left = tmp_path / "untouched", tmp_path / "left"
    ended = run(launch, inputs, untouched, 3, *more)
    assert ended.codes == [0] * 3, ended.text
    program = f"trainer.program={ROOT / 'configs' / 'programs' / 'one_step_off_policy.py'}:step"
    ended = run(launch, inputs, tmp_path / "program", 3, *more, program)
    assert ended.codes == [0] * 3, ended.text
    assert (
        differences(remains(tmp_path / "program" / "run"), remains(untouched / "run"))
        == []
    )
    ended = run(
        launch,
        inputs,
        tmp_path / "grpo",
        3,
        *more,
        f"trainer.program={ROOT / 'configs' / 'programs' / 'grpo.py'}:step",
    )
    assert ended.codes == [2, 1, 1]
    assert (
        "rollout.in_flight_updates: the program calls run.rollout.generate"
        in ended.text
    ), ended.text
    found = [
        record
        for record in metrics(untouched / "run")
        if "rollout/token_staleness_mean" in record
    ]
    assert [record["rollout/staleness"] for record in found] == [
        0.0,
        1.0,
        1.0,
        0.0,
        1.0,
    ]
    # six tokens at most, of which the first three are of older weights
    for record in found:
        older = record["rollout/older_token_share"]
        assert older == record["rollout/token_staleness_mean"] and older in (
            0.0,
            pytest.approx(0.6, abs=0.15),
        )
        assert (older > 0) == (record["rollout/staleness"] > 0)
    ended = run(
        launch, inputs, left, 3, *more, fault=Fault("term", 1, "actor_update", 1)
    )
    assert ended.codes == [75] * 3 and "saved after 1 of 5 steps" in ended.text, (
        ended.text
    )
    [saved] = (left / "run" / "checkpoints").glob("step_*")
    assert (saved / PARTIAL_FILE).exists() and not list(saved.glob("ahead_*"))
    assert run(launch, inputs, left, 3, *more).codes == [0] * 3
    assert differences(remains(left / "run"), remains(untouched / "run")) == ["kept"]


@pytest.fixture(scope="module")
def five_networks() -> Iterator[None]:
    if reason := why_not():
        pytest.skip(reason)
    yield


def test_a_cable_that_is_cut(
    five_networks: None,
    launch: Launcher,
    inputs: Path,
    shared: Path,
    five: Path,
    tmp_path: Path,
) -> None:
    """Five nodes with networks of their own. One loses its link: all end, and name it and its role; then they go on."""
    arguments = [*command_arguments(inputs, tmp_path), *data(inputs), *PPO, FIVE]
    arguments.append("run.timeout_minutes=0.1")
    with networks(5) as nodes:
        written = tmp_path / "run" / "metrics.jsonl"

        def cut() -> None:
            while not (written.exists() and '"step": 2,' in written.read_text()):
                time.sleep(0.01)
            nodes.cut(2)

        thread = threading.Thread(target=cut, daemon=True)
        thread.start()
        # It must not be over before the cable is off.
        slow = Fault("stall", 2, "values", 3)
        faulty = nodes.environment | slow.environment()
        ended = launch.command(
            ["train", *arguments], logs=tmp_path / "output", ranks=5, environment=faulty
        )
        thread.join()
        assert ended.codes == [1] * 5, ended.text
        assert "rank 2 (critic, node-2) has not been heard of for" in ended.text
    with networks(5) as nodes:
        again = launch.command(
            ["train", *arguments],
            logs=tmp_path / "output",
            ranks=5,
            environment=nodes.environment,
        )
        assert again.codes == [0] * 5, again.text
    assert remains(tmp_path / "run")["weights"] == remains(five / "run")["weights"]
    for before, after in zip(measured(shared), measured(tmp_path), strict=True):
        assert after == pytest.approx(before, abs=1e-4, rel=1e-4)


def test_ten_steps_over_torchrun_and_five_networks(
    five_networks: None, launch: Launcher, inputs: Path, tmp_path: Path
) -> None:
    """`tools/netns_cluster.sh`: an agent on each node that says what it is. The curve is that of shared ranks."""
    more = ["trainer={steps: 10, validate_every: 0}", "run.timeout_minutes=2"]
    alone = run(launch, inputs, tmp_path / "alone", 1, *more)
    assert alone.codes == [0], alone.text
    arguments = [
        *command_arguments(inputs, tmp_path / "cluster"),
        *data(inputs),
        *PPO,
        *more,
    ]
    arguments.append("checkpoint.export_hf=false")
    done = subprocess.run(
        ending_with_parent([str(ROOT / "tools" / "netns_cluster.sh"), *arguments]),
        env=environment(
            MEGAVERL_PYTHON=sys.executable,
            LOGS=str(tmp_path / "logs"),
            OMP_NUM_THREADS="1",
        ),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("exit code 0") == 5
    expected, found = measured(tmp_path / "alone"), measured(tmp_path / "cluster")
    assert len(found) == len(expected) == 10
    for before, after in zip(expected, found, strict=True):
        assert after == pytest.approx(before, abs=1e-4, rel=1e-4)
