"""NCCL's messages have no names, and a sender may have to stay until its receiver is there: a step's edges can bear
that, with operators of one's own and with engines ahead too, and what cannot goes over the hosts."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Condition, Thread
from typing import Any, cast

import pytest

from megaverl.config import Config, load_config
from megaverl.dataflow import DataFlow, Operator, in_one_order
from megaverl.dataflow.plan import Edge, Places
from megaverl.distributed.placement import Node, parse_wanted
from megaverl.distributed.placement_resolver import resolve
from megaverl.trainer.disaggregated import between_devices
from megaverl.trainer.roles import Roles
from megaverl.trainer.schedule import Schedule
from megaverl.trainer.step import RLStep
from tests.faults.runs import metrics
from tests.launcher import Launcher
from tests.trainer.conftest import command_arguments

PATIENCE = 20.0  # seconds in which threads come to an end that need none
STEPS = 2
OF_MODELS = frozenset(
    {"old_log_probs", "ref_log_probs", "values", "last_values", "score_norms", "implicit_rewards", "experience"}
)


class Wires:
    """Between every two ranks one, and one for each name: what is laid on it is taken in that order."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.laid: dict[tuple[int, int, str], deque[str]] = {}
        self.taken: list[str] = []

    def wait_for(self, condition: Any) -> None:
        if not self.changed.wait_for(condition, PATIENCE):
            raise TimeoutError


class Carrier:
    """A rank's ends of all edges. Of those between devices a sender stays until all of it is taken."""

    def __init__(self, wires: Wires, rank: int, between_devices: Collection[Edge]) -> None:
        self.wires, self.rank, self.between_devices = wires, rank, between_devices

    def _wires(self, edge: Edge, ends: tuple[int, ...], *, out: bool) -> list[deque[str]]:
        name = "" if edge in self.between_devices else f"{edge.value} of {edge.maker}"
        pairs = [(self.rank, end) if out else (end, self.rank) for end in ends]
        return [self.wires.laid.setdefault((*pair, name), deque()) for pair in pairs]

    def send(self, edge: Edge, values: Mapping[str, Any]) -> None:
        with self.wires.changed:
            mine = self._wires(edge, edge.dest, out=True)
            for wire in mine:
                wire.append(edge.value)
            self.wires.changed.notify_all()
            if edge in self.between_devices:
                self.wires.wait_for(lambda: not any(edge.value in wire for wire in mine))

    def receive(self, edge: Edge, values: Mapping[str, Any]) -> Any:
        with self.wires.changed:
            mine = self._wires(edge, edge.source, out=False)
            self.wires.wait_for(lambda: all(mine))
            assert [wire.popleft() for wire in mine] == [edge.value] * len(mine), "another edge's rows"
            self.wires.taken += [edge.value] * (edge in self.between_devices)
            self.wires.changed.notify_all()


def config(name: str, *given: str) -> Config:
    settings = ["model.path=m", "data.train=t", "reward=exact_match", f"algorithm={name}", *given]
    return load_config(None, settings, check_paths=False)


def as_on_ranks(flow: DataFlow, places: Places) -> DataFlow:
    """The same operators, which compute nothing; all ranks of one are in it at the same time."""

    def stub(each: Operator) -> Operator:
        together = Barrier(len(flow.plan.ranks[each.name] or ()))

        def function(**_: Any) -> Any:
            together.wait(PATIENCE)
            return dict.fromkeys(each.gives) if len(each.gives) > 1 else None

        return replace(each, func=function)

    return DataFlow([stub(each) for each in flow.plan.operators]).compile(("prompts", "step"), places=places)


APART = {"actor": (0, 1), "critic": (2, 3), "reference": (4, 5), "rollout": (6,), "reward": (7,)}
PLACEMENTS: dict[str, Places] = {
    "all apart": APART,
    "critic and reference together": {**APART, "reference": (2, 3)},
    "reward with reference": {**APART, "reward": (4, 5)},
    "critic with rollout": {**APART, "critic": (6,)},
    "actor's reference": {**APART, "reference": (0, 1)},
    "all but rollout on two": {**dict.fromkeys(APART, (0, 1)), "rollout": (2,)},
    "actor with rollout": {**APART, "rollout": (0, 1)},
}
ALGORITHMS = {
    "ppo": "{name: ppo, kl: {in: reward, coef: 0.1}}",
    "grpo": "{name: grpo, group_size: 2, kl: {in: loss, coef: 0.1}}",
    "baseline of tokens": "{name: optimal_token_baseline, group_size: 2}",
    "prime": "{name: prime, group_size: 2}",
    "remax": "{name: remax}",
}


def run_on_threads(flow: DataFlow, places: Places, between_devices: Collection[Edge]) -> list[str]:
    """A few runs, one after the other on each rank; the values that came from device to device."""
    wires, ended, stuck = Wires(), set[int](), dict[int, str]()
    flow = as_on_ranks(flow, places)
    ranks = sorted({rank for ranks in places.values() for rank in ranks})

    def steps(rank: int) -> None:
        try:
            for step in range(STEPS):
                flow.run(carrier=Carrier(wires, rank, between_devices), prompts=[], step=step, leave_out=("reshard",))
            ended.add(rank)
        except (TimeoutError, BrokenBarrierError) as error:
            stuck[rank] = repr(error)

    threads = [Thread(target=steps, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE)
    assert (stuck, ended) == ({}, set(ranks))
    return wires.taken


def step_of(given: Config, placement: str | Places) -> DataFlow:
    places = PLACEMENTS[placement] if isinstance(placement, str) else placement
    return RLStep(given, cast(Roles, None), None).flow(places)


def kept_of(given: Config, flow: DataFlow, **places: str | int) -> set[tuple[str, str]]:
    """The edges between devices, as values and who takes them, of roles on so many ranks."""
    wanted = {role: parse_wanted(ranks) for role, ranks in places.items()}
    size = 1 + max(rank for place in wanted.values() for rank in place.ranks or ())
    placement = resolve(wanted, size, {role: None for role in wanted if role != "coordinator"}, [Node("here", size)])
    flow.compile(("prompts", "step"), places=placement.ranks)
    return {(edge.value, *edge.takers) for edge in between_devices(flow.plan, Schedule.of(given, placement))}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_rank_waits_for_ever_nor_takes_anothers_rows(algorithm: str, placement: str) -> None:
    flow = step_of(config(ALGORITHMS[algorithm]), placement)
    expected = {edge for edge in flow.plan.edges if edge.value in OF_MODELS}
    between = {edge for edge in in_one_order(flow.plan, expected, ("reshard",))}
    assert between == expected
    taken = run_on_threads(flow, PLACEMENTS[placement], between)
    assert len(taken) == STEPS * len([edge for edge in expected for _ in edge.dest])


def random_flow(seed: int) -> tuple[DataFlow, Places]:
    """Operators on some ranks each, which take some of what came before, and change some of it."""
    draw = random.Random(seed)
    places = {f"role {number}": tuple(sorted(draw.sample(range(4), draw.choice([1, 1, 2])))) for number in range(4)}
    flow, values = DataFlow(), ["prompts"]
    for number in range(draw.randint(4, 9)):
        takes = draw.sample(values, min(len(values), draw.choice([1, 2, 2])))
        changes = [value for value in takes if value != "prompts" and number == 6]
        gives = changes[:1] or [f"value {number}"]
        role = draw.choice([*places])
        flow.add_operator(Operator(f"operator {number}", lambda **_: None, tuple(takes), tuple(gives), role))
        values += [value for value in gives if value not in values]
    return flow, places


def test_flows_of_ones_own_go_between_devices_in_what_order_they_have() -> None:
    kept = moved = 0
    for seed in range(100):
        flow, places = random_flow(seed)
        plan = flow.compile(("prompts", "step"), places=places).plan
        between = in_one_order(plan, plan.edges)
        run_on_threads(flow, places, between)
        kept, moved = kept + len(between), moved + len(plan.edges)
    assert 0.8 * moved < kept < moved


def test_an_edge_that_would_hold_whom_its_taker_waits_for_goes_over_the_hosts() -> None:
    """`late` is taken after `back`, which comes of what its sender gives next."""
    flow = DataFlow()
    for name, takes, role in (
        ("late", ("prompts",), "a"), ("next", ("late",), "a"), ("back", ("next",), "b"), ("end", ("back", "late"), "c"),
    ):  # fmt: skip
        flow.add_operator(Operator(name, lambda **_: None, takes, role=role))
    flow.add_operator(Operator("first", lambda **_: None, ("back",), role="c"), before="end")
    places = {"a": (0,), "b": (1,), "c": (2,)}
    plan = flow.compile(("prompts", "step"), places=places).plan
    assert {edge.value for edge in plan.edges} - {edge.value for edge in in_one_order(plan, plan.edges)} == {"late"}


def test_engines_ahead_hold_no_edge_that_leads_to_training() -> None:
    """Critic and reference hold what they have ahead of the actor until it is there."""
    given = config(ALGORITHMS["ppo"], "rollout={async_rollout: true, max_staleness: 3}", "placement.rollout=0")
    apart = {"rollout": 0, "actor": 1, "critic": 2, "reference": 3, "reward": 4, "coordinator": 1}
    flow = step_of(given, APART)
    of_training = {("experience", "critic_update")} | {
        (value, "advantages") for value in ("values", "last_values", "ref_log_probs")
    }
    assert kept_of(given, flow, **apart) == of_training
    # what a critic ahead takes from a reference that is further ahead, nobody is known to have come to
    flow.add_operator(Operator("both", lambda **_: None, ("ref_log_probs", "values"), role="critic"))
    flow.add_operator(Operator("seen", lambda **_: None, ("both",), (), role="actor"))
    assert kept_of(given, flow, **apart) == of_training | {("both", "seen")}
    together = config(ALGORITHMS["ppo"])
    assert kept_of(together, flow, **apart) == of_training | {("both", "seen"), ("ref_log_probs", "both")}


RUN = [
    "rollout.engine=hf",
    "algorithm={name: ppo, num_mini_batches: 2, kl: {in: reward, kind: k1, coef: 0.01}}",
    "algorithm.bootstrap_truncated=true",
    "actor={tp: 1, optimizer: {lr: 1.0e-3}}",
    "trainer={steps: 2, validate_every: 0}",
    "checkpoint={save_interval: 0}",
    "run={name: run, log_with: jsonl, timeout_minutes: 0.4}",
]


FOUR = "placement={rollout: 0, actor: 1, critic: 2, reference: 3}"
BY_ACTOR = {"ref_log_probs", "values", "last_values"}
CASES: dict[str, tuple[int, set[str], list[str]]] = {
    "apart": (4, BY_ACTOR | {"advantages", "returns"}, [FOUR]),
    "together": (2, {"scores", "advantages"}, []),
    "ahead": (
        4,
        BY_ACTOR | {"advantages", "returns"},
        [FOUR, "rollout={async_rollout: true, max_staleness: 2}", "trainer.steps=4", "checkpoint.save_interval=3"],
    ),
    "islands": (
        5,
        {"ref_log_probs", "of_each", "means", "joining the islands' gradients"},
        [
            "placement={rollout: 0, actor: 1-2, reference: 3, coordinator: 4, actor_islands: 2}",
            f"trainer.operators=['{Path(__file__).with_name('devices_program.py')}:add_operators']",
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_same_to_the_bit_either_way(launch: Launcher, inputs: Path, tmp_path: Path, case: str) -> None:
    """Between devices go values, log-probs and what is made of them, by NCCL's rules between worlds: roles on ranks of
    their own, all on two, with critic and reference ahead, and beside islands with operators of one's own."""
    ranks, expected, given = CASES[case]
    program = str(Path(__file__).with_name("devices_program.py"))
    moved: dict[str, set[str]] = {}
    for way, first in (("hosts", []), ("devices", [program])):
        arguments = [*first, "train", *command_arguments(inputs, tmp_path / way), *RUN, *given]
        ended = launch.command(arguments, logs=tmp_path / f"logs {way}", ranks=ranks)
        assert ended.codes == [0] * ranks, ended.text
        logs = "".join(path.read_text() for path in (tmp_path / way / "run" / "logs").iterdir())
        moved[way] = set(", ".join(re.findall(r"between devices: (.*)", logs)).split(", "))
    assert moved["hosts"] == {""} and moved["devices"] >= expected
    before, after = (metrics(tmp_path / way / "run") for way in ("hosts", "devices"))
    assert len(after) == 4 if case == "ahead" else 2
    assert {"critic/loss", "actor/loss", "train/kl"} <= after[0].keys() and after == before
