"""Programs of a run: which calls they make, in which order, and that they compute what the flow of operators does."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest

from megaverl.config import Config
from megaverl.controller.core import Controller
from megaverl.controller.groups import WorkerGroup
from megaverl.distributed.placement import Node
from megaverl.distributed.placement_resolver import resolve
from megaverl.trainer import (
    agents,
    offline,
    role_groups,
    role_workers,
    rollouts_only,
)
from megaverl.trainer.program import flow_step, policy_step, train
from megaverl.trainer.role_groups import StepProgram, TrainedGroup, make_run
from megaverl.trainer.served_run import RecorderWorker, SessionWorker
from megaverl.trainer.step_flow import make_plan
from tests.controller.simulation import SimulatedCluster, SimulatedOutcome

WORKERS: dict[type[WorkerGroup], type] = {
    role_groups.SessionGroup: SessionWorker,
    role_groups.RecorderGroup: RecorderWorker,
    role_groups.ReceiverGroup: role_workers.ReceiverWorker,
    role_groups.RolloutGroup: role_workers.RolloutWorker,
    role_groups.RewardGroup: role_workers.RewardWorker,
    role_groups.ReferenceGroup: role_workers.ReferenceWorker,
    role_groups.CriticGroup: role_workers.CriticWorker,
    role_groups.ActorGroup: role_workers.ActorWorker,
    role_groups.OperatorGroup: role_workers.OperatorWorker,
    offline.TrainerGroup: offline.TrainerWorker,
    role_groups.IslandGroup: role_workers.IslandWorker,
    agents.AgentsGroup: agents.AgentsWorker,
    rollouts_only.StorageGroup: rollouts_only.StorageWorker,
}


ROLES = ("actor", "critic", "reference", "reward", "rollout", "coordinator")
PLACEMENT = resolve({}, 1, dict.fromkeys(ROLES), [Node("here", 1)])


class Recorder:
    """Worker of any role that writes down what it is asked for.

    Args:
        answers: by method, what it returns; anything else is a value that stays here.
    """

    def __init__(
        self, role: str, calls: list[str], answers: Mapping[str, Callable[..., object]]
    ) -> None:
        self._role, self._calls, self._answers = role, calls, answers

    def _take(self, method: str, *arguments: object) -> object:
        self._calls.append(f"{self._role}.{method}")
        answer = self._answers.get(method)
        return method if answer is None else answer(*arguments)


def make_recorder(
    group: type, role: str, calls: list[str], answers: Mapping[str, Any]
) -> Recorder:
    """Return a recorder with the methods of a group; their parameters have no types, so nothing is converted."""
    methods: dict[str, Any] = {}
    for name, function in public_methods(group).items():
        count = len(inspect.signature(function).parameters) - 1
        names = ", ".join(f"argument{number}" for number in range(count))
        methods[name] = eval(f"lambda self, {names}: self._take({name!r}, {names})", {})
    return type("Recorder", (Recorder,), methods)(role, calls, answers)


# What a group does without a call of its own.
OF_THE_PROGRAM = ("begin_update", "join_islands")


def public_methods(owner: type) -> dict[str, Callable[..., Any]]:
    """Return the methods that a class, or `TrainedGroup` for it, defines and that ranks serve."""
    members = {
        **(vars(TrainedGroup) if issubclass(owner, TrainedGroup) else {}),
        **vars(owner),
    }
    methods = {
        name: member
        for name, member in members.items()
        if inspect.isfunction(member) and name[0] != "_"
    }
    return {
        name: method for name, method in methods.items() if name not in OF_THE_PROGRAM
    }


def configuration(settings: dict[str, Any]) -> Config:
    return Config.model_validate(
        {"model": {"path": "model"}, "trainer": {"steps": 1}, **settings}
    )


def simulate(
    settings: dict[str, Any],
    first_step: int = 0,
    step: StepProgram = policy_step,
    **answers: Callable[..., object],
) -> list[str]:
    """Run `train` on one simulated rank; return the calls that it made."""
    config = configuration(settings)
    calls: list[str] = []
    standard = {
        "save_if_due": lambda done: None,
        "update": lambda rollouts, experience, step: True,
        **dict.fromkeys(NOTHING, lambda *arguments: None),
        **answers,
    }

    def make_workers(cluster: SimulatedCluster, rank: int) -> dict[str, object]:
        workers = {
            group.__name__.removesuffix("Group").lower(): make_recorder(
                group, group.__name__.removesuffix("Group").lower(), calls, standard
            )
            for group in WORKERS
        }
        operators = make_recorder(
            role_workers.OperatorWorker, "operators", calls, standard
        )
        return {**workers, "weights": make_sync(calls), "operators": operators}

    def program(controller: Controller) -> Coroutine[Any, Any, None]:
        run = make_run(
            config,
            controller,
            PLACEMENT,
            step=step,
            has_engines=True,
            restored_steps=frozenset(),
        )
        run.operators.plan = make_plan(config)
        if asks := answers.get("asks"):
            asks(controller)
        return train(run, first_step)

    outcome: SimulatedOutcome = SimulatedCluster(1, seed=0).run(program, make_workers)
    if outcome.error is not None:
        raise outcome.error
    return calls


NOTHING = (
    "begin_step",
    "report_step",
    "record_validation",
    "leave",
    "take",
    "update_mix",
    "sync",
)
RESULT = {"metrics": {}, "samples": "[]"}


def make_sync(calls: list[str]) -> object:
    class Sync(WorkerGroup):
        def sync(self, is_updated: bool) -> None: ...

    return make_recorder(Sync, "weights", calls, {"sync": lambda is_updated: None})


def step_of(calls: list[str]) -> list[str]:
    """Calls of one step, without what surrounds it."""
    return calls[calls.index("session.begin_step") + 1 : calls.index("recorder.take")]


@pytest.mark.parametrize("group", WORKERS, ids=lambda group: group.__name__)
def test_a_group_and_its_worker_have_the_same_methods(group: type[WorkerGroup]) -> None:
    # The ranks of two roles serve one; the other chooses ranks by itself.
    ends_elsewhere = {"sync_weights", "call"}
    of_group = {
        name: list(inspect.signature(method).parameters)
        for name, method in public_methods(group).items()
    }
    of_worker = {
        name: list(inspect.signature(method).parameters)
        for name, method in public_methods(WORKERS[group]).items()
    }
    assert of_group.keys() - {"sync_weights"} == of_worker.keys()
    assert all(
        of_group[name] == of
        for name, of in of_worker.items()
        if name not in ends_elsewhere
    )


def test_a_step_of_ppo_in_its_order() -> None:
    settings = {"algorithm": {"name": "ppo", "kl": {"in": "reward", "coef": 0.1}}}
    calls = simulate(settings)
    assert step_of(calls) == [
        "rollout.generate",
        "reward.score",
        "actor.old_log_probs",
        "reference.log_probs",
        "critic.values",
        "actor.advantages",
        "critic.update",
        "actor.update",
        "weights.sync",
    ]


def test_a_step_of_grpo_has_no_critic_and_without_a_kl_term_no_reference() -> None:
    calls = simulate({"algorithm": {"name": "grpo", "group_size": 4}})
    assert step_of(calls) == [
        "rollout.generate",
        "reward.score",
        "actor.old_log_probs",
        "actor.advantages",
        "actor.update",
        "weights.sync",
    ]


def test_with_overlap_the_actor_is_updated_before_the_critic() -> None:
    calls = simulate(
        {"algorithm": {"name": "ppo"}, "reshard": {"overlap": True, "alias": "never"}}
    )
    assert (
        calls.index("actor.update")
        < calls.index("critic.update")
        < calls.index("weights.sync")
    )


@pytest.mark.parametrize("given", [["step"], ["step", "scores"]], ids=str)
def test_a_flow_runs_its_operators_in_order_but_for_values_that_exist(
    given: list[str],
) -> None:
    """Rewards exist if the run goes on after it has scored a step."""
    called: list[str] = []

    def call(name: str, inputs: list[object]) -> dict[str, object]:
        called.append(name)
        return {}

    settings = {"algorithm": {"name": "ppo", "kl": {"in": "reward", "coef": 0.1}}}
    calls = simulate(
        settings, step=flow_step, begin=lambda step, made: given, call=call
    )
    assert "rollout.generate" in calls
    operators = [
        operator.name for operator in make_plan(configuration(settings)).operators
    ]
    assert operators[:2] == ["rollout", "reward"]
    assert called == operators[1 + ("scores" in given) :]


@pytest.mark.parametrize(
    ("name", "signals"),
    [
        ("remax", ["rollout.generate_greedy", "reward.score_greedy"]),
        ("optimal_token_baseline", ["actor.score_norms"]),
    ],
)
def test_baselines_that_need_more_get_it(name: str, signals: list[str]) -> None:
    calls = simulate({"algorithm": {"name": name, "group_size": 4}})
    step = step_of(calls)
    after = step.index("actor.old_log_probs") + 1
    assert step[after : after + len(signals)] == signals


def test_dynamic_sampling_goes_on_until_no_group_is_missing() -> None:
    missing = iter([3, 1, 0])
    prompts: list[int] = []

    def generate_round(step: int, num_prompts: int) -> str:
        prompts.append(num_prompts)
        return "rollouts"

    settings = {
        "algorithm": {
            "name": "grpo",
            "group_size": 4,
            "dynamic_sampling": {"metric": "reward"},
        }
    }
    calls = simulate(
        settings,
        begin_rounds=lambda step: 8,
        generate_round=generate_round,
        add_round=lambda rollouts, scores, step: next(missing),
    )
    assert prompts == [8, 3, 1]
    assert "rollout.generate" not in calls
    assert calls.count("reward.score") == 3


def test_a_run_validates_first_goes_through_the_steps_that_are_left_and_saves_after_each() -> (
    None
):
    begun: list[int] = []
    validated: list[int] = []
    settings = {
        "algorithm": {"name": "grpo", "group_size": 4},
        "trainer": {"steps": 5, "validate_at_start": True, "validate_every": 2},
        "data": {"validation": ["held_out.jsonl"]},
    }

    def note(done: int, result: object) -> None:
        validated.append(done)

    answers = {
        "begin_step": begun.append,
        "record_validation": note,
        "measure_held_out": lambda *_: RESULT,
    }
    calls = simulate(settings, **answers)
    assert calls[:3] == [
        "rollout.generate_held_out",
        "reward.score_held_out",
        "rollout.measure_held_out",
    ]
    assert begun == [0, 1, 2, 3, 4]
    assert calls.count("session.save_if_due") == 5
    assert validated == [0, 2, 4, 5]
    begun.clear()
    validated.clear()
    simulate(settings, 2, **answers)
    assert begun == [2, 3, 4]
    assert validated == [4, 5], "a run that goes on has validated before"


@pytest.mark.parametrize("after", ["generate", "score", "save_if_due"])
def test_a_signal_is_followed_where_nothing_is_lost(after: str) -> None:
    """Inside a step before anything is trained, with what is there; else after the step."""
    kept: list[tuple[object, ...]] = []
    controllers: list[Controller] = []

    def leave(number: int, *values: object) -> None:
        kept.append((number, *values))

    def note(*arguments: object) -> object:
        controllers[0].signal = signal.SIGTERM
        return None if after == "save_if_due" else after

    settings = {"algorithm": {"name": "grpo", "group_size": 4}, "trainer": {"steps": 3}}
    calls = simulate(
        settings, **{after: note, "leave": leave, "asks": controllers.append}
    )
    values = {
        "generate": ("generate", None),
        "score": ("generate", "score"),
        "save_if_due": (None, None),
    }[after]
    assert kept == [(signal.SIGTERM, *values)]
    assert calls[-1] == "session.leave"
    assert calls.count("session.begin_step") == 1
