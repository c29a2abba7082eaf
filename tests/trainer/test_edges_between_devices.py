"""NCCL's messages have no names, and a sender may have to stay until its receiver is there: a step's own edges can bear
that, and what cannot goes over the hosts."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Condition, Thread
from typing import Any, cast

import pytest

from megaverl.config import Config, load_config
from megaverl.dataflow import DataFlow, Operator
from megaverl.dataflow.plan import Edge, Places
from megaverl.trainer.disaggregated import in_one_order
from megaverl.trainer.roles import Roles
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
    """A rank's ends of all edges. Of what a model has computed its sender stays until all of it is taken."""

    def __init__(self, wires: Wires, rank: int) -> None:
        self.wires, self.rank = wires, rank

    def _wires(self, edge: Edge, ends: tuple[int, ...], *, out: bool) -> list[deque[str]]:
        name = "" if edge.value in OF_MODELS else f"{edge.value} of {edge.maker}"
        pairs = [(self.rank, end) if out else (end, self.rank) for end in ends]
        return [self.wires.laid.setdefault((*pair, name), deque()) for pair in pairs]

    def send(self, edge: Edge, values: Mapping[str, Any]) -> None:
        with self.wires.changed:
            mine = self._wires(edge, edge.dest, out=True)
            for wire in mine:
                wire.append(edge.value)
            self.wires.changed.notify_all()
            if edge.value in OF_MODELS:
                self.wires.wait_for(lambda: not any(edge.value in wire for wire in mine))

    def receive(self, edge: Edge, values: Mapping[str, Any]) -> Any:
        with self.wires.changed:
            mine = self._wires(edge, edge.source, out=False)
            self.wires.wait_for(lambda: all(mine))
            assert [wire.popleft() for wire in mine] == [edge.value] * len(mine), "another edge's rows"
            self.wires.taken.append(edge.value)
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


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_rank_waits_for_ever_nor_takes_anothers_rows(algorithm: str, placement: str) -> None:
    places, wires, ended, stuck = PLACEMENTS[placement], Wires(), set[int](), dict[int, str]()
    nobody = cast(Roles, None)
    flow = as_on_ranks(RLStep(config(ALGORITHMS[algorithm]), nobody, None).flow(places), places)
    ranks = sorted({rank for ranks in places.values() for rank in ranks})
    all_ranks = Barrier(len(ranks))

    def steps(rank: int) -> None:
        try:
            for step in range(STEPS):
                flow.run(carrier=Carrier(wires, rank), prompts=[], step=step)
                all_ranks.wait(PATIENCE)
            ended.add(rank)
        except (TimeoutError, BrokenBarrierError) as error:
            stuck[rank] = repr(error)

    threads = [Thread(target=steps, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE)
    assert (stuck, ended) == ({}, set(ranks))
    moved = [edge for edge in flow.plan.edges if edge.value in OF_MODELS for _ in edge.dest]
    assert sum(value in OF_MODELS for value in wires.taken) == STEPS * len(moved)


def refused() -> Iterator[Config]:
    yield config(ALGORITHMS["grpo"], "rollout.async_rollout=true", "placement.rollout={num_ranks: 1}")
    yield config(ALGORITHMS["grpo"], "trainer.operators=[m:f]")


def test_what_may_be_taken_late_goes_over_the_hosts() -> None:
    placement: Any = type("Placed", (), {"islands": ((0,),)})
    assert in_one_order(config(ALGORITHMS["grpo"]), placement)
    assert not any(in_one_order(each, placement) for each in refused())
    placement.islands = ((0,), (1,))
    assert not in_one_order(config(ALGORITHMS["grpo"]), placement)


RUN = [
    "rollout.engine=hf",
    "algorithm={name: ppo, num_mini_batches: 2, kl: {in: reward, kind: k1, coef: 0.01}}",
    "algorithm.bootstrap_truncated=true",
    "actor={tp: 1, optimizer: {lr: 1.0e-3}}",
    "trainer={steps: 2, validate_every: 0}",
    "checkpoint={save_interval: 0}",
    "run={name: run, log_with: jsonl, timeout_minutes: 0.4}",
]


@pytest.mark.parametrize("placement", ["placement={rollout: 0, actor: 1, critic: 2, reference: 3}", ""])
def test_a_run_is_the_same_to_the_bit_either_way(
    launch: Launcher, inputs: Path, tmp_path: Path, placement: str
) -> None:
    """Roles on ranks of their own, and all on two; between devices go values, log-probs and what is made of them."""
    ranks, given = (4, [*RUN, placement]) if placement else (2, RUN)
    program = str(Path(__file__).with_name("devices_program.py"))
    moved: dict[str, set[str]] = {}
    for way, first in (("hosts", []), ("devices", [program])):
        arguments = [*first, "train", *command_arguments(inputs, tmp_path / way), *given]
        ended = launch.command(arguments, logs=tmp_path / f"logs {way}", ranks=ranks)
        assert ended.codes == [0] * ranks, ended.text
        logs = "".join(path.read_text() for path in (tmp_path / way / "run" / "logs").iterdir())
        moved[way] = set(", ".join(re.findall(r"between devices: (.*)", logs)).split(", "))
    apart = {"ref_log_probs", "values", "last_values", "advantages", "returns"}
    assert moved["hosts"] == {""} and moved["devices"] >= (apart if placement else {"scores", "advantages"})
    expected, found = (metrics(tmp_path / way / "run") for way in ("hosts", "devices"))
    assert len(found) == 2 and {"critic/loss", "actor/loss", "train/kl"} <= found[0].keys()
    for before, after in zip(expected, found, strict=True):
        assert after == before
