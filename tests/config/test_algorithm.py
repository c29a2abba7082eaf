"""`algorithm`: names that are read from the source without torch, options, and combinations that are refused."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest

from megaverl import algorithms
from megaverl.algorithms import registry
from megaverl.config.algorithm import PRESETS, AlgorithmName
from megaverl.config.named_functions import ESTIMATOR_INPUTS
from megaverl.config.signatures import registered, user_function_signature

REGISTRIES = (
    "advantage_estimators",
    "policy_losses",
    "aggregations",
    "corrections",
    "token_selectors",
    "kl_estimators",
    "preference_losses",
    "divergences",
    "value_losses",
)


@pytest.mark.parametrize("name", REGISTRIES)
def test_what_the_source_says_is_what_is_registered(name):
    live: registry.Registry = getattr(algorithms, name)
    read = registered(name)
    assert set(read) == set(live)
    for entry in (live.get(key) for key in live):
        found = read[entry.name]
        assert (found.inputs, found.optional_inputs) == (
            entry.inputs,
            entry.optional_inputs,
        ), entry.name
        assert list(found.options) == list(entry.options)


def test_reading_the_source_loads_no_torch():
    code = "import sys; from megaverl.config import Config; Config().uses_critic; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False"]


def test_presets_are_names_that_exist():
    assert set(PRESETS) == set(get_args(AlgorithmName))
    for preset in PRESETS.values():
        assert preset.advantage in registered("advantage_estimators")
        assert preset.policy_loss in registered("policy_losses")
        assert preset.aggregation in registered("aggregations")
        assert preset.divergence is None or preset.divergence in registered(
            "divergences"
        )
        assert set(preset.loss_options) <= set(
            registered("policy_losses")[preset.policy_loss].options
        )


def test_every_estimator_that_a_step_can_feed_has_a_preset():
    feedable = {
        name
        for name, f in registered("advantage_estimators").items()
        if set(f.inputs) <= set(ESTIMATOR_INPUTS)
    }
    feedable.remove("nash_md")  # an option says how its opponents are drawn
    assert feedable == {preset.advantage for preset in PRESETS.values()} & feedable


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_needs_nothing_but_what_is_said(load, mistakes, name):
    needs = {
        "dr_grpo": ["algorithm.loss_length=256"],
        "pass_at_k": ["algorithm.advantage_options.k=2"],
        "gkd": ["reference.path=org/teacher"],
        "distillation": ["reference.path=org/teacher"],
    }
    in_turns = ["environment.name=guess"] if name.startswith("turn_") else []
    config = load(
        f"algorithm={{name: {name}, group_size: 4}}", *needs.get(name, []), *in_turns
    )
    assert config.uses_critic == (name in ("ppo", "turn_ppo"))
    assert config.uses_reference == (name in ("distillation", "gkd", "prime"))
    assert config.uses_ref_log_probs == (name in ("distillation", "prime"))
    assert config.trains_reward_model == (name == "prime")
    if name in needs:
        assert set(mistakes(f"algorithm={{name: {name}, group_size: 4}}")) == {
            needs[name][0].split("=")[0]
        }


def test_parts_are_set_one_by_one(load):
    config = load(
        "algorithm={name: grpo, group_size: 2, advantage: rloo, policy_loss: sapo, loss_aggregation: token_sum}"
    )
    algorithm = config.algorithm
    assert (algorithm.advantage_name, algorithm.policy_loss_name) == ("rloo", "sapo")
    assert algorithm.aggregation_name == "token_sum"
    assert load("algorithm={name: grpo, group_size: 2, advantage: gae}").uses_critic


G, T = "algorithm.group_size=4", "reference.path=org/teacher"
IN_REWARD = "algorithm.kl={in: reward, coef: 0.1}"
OTHER, TAUGHT = "reference.tokenizer=org/other", "algorithm.distillation"
N = [
    "algorithm.name=grpo",
    "algorithm.advantage=nash_md",
    G,
    "algorithm.opponent_beta=0.25",
    "rollout.engine=hf",
]
D = ["algorithm.name=distillation", T, OTHER]
LAST = ""  # the key that the last override sets


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["algorithm.name=gsop"], LAST, "Did you mean `gspo`?"),
        (
            ["algorithm.name=dual_clip"],
            LAST,
            "It is a part: algorithm.policy_loss: dual_clip.",
        ),
        (
            ["algorithm.name=dpo"],
            LAST,
            "It is a part: preference.loss: dpo of `megaverl dpo`.",
        ),
        (
            ["algorithm.advantage=grop", G],
            "algorithm.advantage",
            "Did you mean `grpo`?",
        ),
        (["algorithm.policy_loss=ppo-clip"], LAST, "Did you mean `ppo_clip`?"),
        (["algorithm.loss_aggregation=token_maen"], LAST, "Did you mean `token_mean`?"),
        (
            ["algorithm.kl={in: loss, coef: 0.1, kind: low_var}"],
            "algorithm.kl.kind",
            "Did you mean `low_variance`?",
        ),
        (["algorithm.correction.kind=tis"], LAST, "known: geometric_mask"),
        (
            ["algorithm.advantage=rloo"],
            "algorithm.group_size",
            "rloo compares the responses of a group",
        ),
        (["algorithm.name=gdpo"], "algorithm.group_size", "found 1; gdpo compares"),
        (
            ["algorithm.name=grpo", G, "algorithm.value_loss_coef=0.5"],
            LAST,
            "no critic",
        ),
        (
            ["algorithm.name=grpo", G, "algorithm.critic_warmup_steps=3"],
            LAST,
            "no critic",
        ),
        (
            ["algorithm.name=rloo", G, "algorithm.value_clip_range=null"],
            LAST,
            "no critic",
        ),
        (
            ["algorithm.advantage=turn_grpo", G],
            "algorithm.advantage",
            "without environment.name a response has no",
        ),
        (
            ["algorithm.name=gdpo", G, IN_REWARD],
            "algorithm.kl.in",
            "gdpo reads neither rewards nor token_rewards",
        ),
        (
            ["algorithm.clip_range=0.2", "algorithm.policy_loss=sapo"],
            "algorithm.clip_range",
            "sapo has no clip_low",
        ),
        (["algorithm.policy_loss_options.fraction=0.1"], LAST, "no such option"),
        (
            ["algorithm.name=kl_cov", G, "algorithm.policy_loss_options.fracton=0.1"],
            LAST,
            "Did you mean `fraction`?",
        ),
        (
            [
                "algorithm.name=sapo",
                G,
                "algorithm.policy_loss_options.tau_negative=high",
            ],
            LAST,
            "found 'high'; expected float",
        ),
        (["algorithm.name=gpg", G, "algorithm.advantage_options.k=2"], LAST, "no such"),
        (
            ["algorithm.name=pass_at_k", G, "algorithm.advantage_options.k=8"],
            LAST,
            "algorithm.group_size=4",
        ),
        (
            ["algorithm.distillation.divergence=reverse_lk", T],
            "algorithm.distillation.divergence",
            "`reverse_kl`?",
        ),
        (["algorithm.distillation.coef=2.0"], LAST, "divergence is null"),
        (
            ["algorithm.name=gkd"],
            "reference.path",
            "is not set; jensen_shannon compares the actor with a teacher",
        ),
        (
            ["algorithm.name=gkd", T, "reference.pp=2"],
            LAST,
            "found 2, and actor.pp is 1",
        ),
        (
            [
                "algorithm.name=gkd",
                T,
                "run.nproc=4",
                "placement={actor: 0-1, rollout: 2, reference: 3}",
            ],
            "placement.reference",
            "compares the teacher's logits",
        ),
        (
            ["algorithm.name=gkd", T, "algorithm.distillation.options.beta=1.0"],
            LAST,
            "above 0 and below 1",
        ),
        (
            ["algorithm.name=gkd", T, "algorithm.distillation.options.bata=0.5"],
            LAST,
            "Did you mean `beta`?",
        ),
        (["algorithm.advantage=none"], LAST, "nothing else trains"),
        (
            ["algorithm.name=raft", G, "algorithm.advantage_options.keep=9"],
            LAST,
            "algorithm.group_size=4",
        ),
        (
            ["algorithm.name=raft", G, "algorithm.advantage_options.keep=0"],
            LAST,
            "at le",
        ),
        (
            ["algorithm.name=sapo", G, "algorithm.policy_loss_options.tau_positive=0"],
            LAST,
            "found 0; expected above 0",
        ),
        (
            [
                "algorithm.name=clip_cov",
                G,
                "algorithm.policy_loss_options={covariance_low: 2, covariance_high: 1}",
            ],
            "algorithm.policy_loss_options.covariance_low",
            "found 2; expected below covariance_high, 1",
        ),
        (
            ["algorithm.correction={kind: token_mask, low: 2.0, high: 1.0}"],
            "algorithm.correction.low",
            "found 2.0; expected below high, 1.0",
        ),
        (
            [
                "algorithm.name=dppo_tv",
                G,
                "algorithm.policy_loss_options.threshold=.nan",
            ],
            LAST,
            "a finite number",
        ),
        (
            ["algorithm.name=dppo_tv", G, "algorithm.policy_loss_options.ratio_max=0"],
            LAST,
            "expected above 0",
        ),
        (
            ["algorithm.policy_loss=dro", "algorithm.policy_loss_options.over=turn"],
            LAST,
            "expected Literal",
        ),
        (
            [
                "algorithm.policy_loss=vespo",
                "algorithm.policy_loss_options.correction_in=mask",
            ],
            LAST,
            "expected Literal",
        ),
        (
            [
                G,
                "mix=[{update: preference}]",
                "preference={loss: cpo, options: {sft_over: all}}",
            ],
            "preference.options.sft_over",
            "expected Literal",
        ),
        (
            ["algorithm.loss_aggregation=fixed_length"],
            "algorithm.loss_length",
            "loss_length: 256",
        ),
        (["algorithm.correction.high=2.0"], LAST, "kind is none"),
        (
            ["algorithm.correction={kind: sequence_truncate, low: 0.5}"],
            "algorithm.correction.low",
            "sequence_truncate has no such limit",
        ),
        (
            ["algorithm.correction={kind: token_mask, low: -0.5}"],
            "algorithm.correction.low",
            "a ratio is at least 0",
        ),
        (
            ["algorithm.correction.kind=reject"],
            "algorithm.correction.high",
            "is not set, and reject needs it",
        ),
        (
            ["algorithm.correction={kind: reject, high: 1, options: {over: tokens}}"],
            "algorithm.correction.options.over",
            "found 'tokens'; expected Literal",
        ),
        (
            ["algorithm.correction={kind: reject, high: 1, options: {high: 1}}"],
            "algorithm.correction.options.high",
            "is a key of its own: algorithm.correction.high",
        ),
        (["algorithm.correction.options={over: sum}"], LAST, "kind is none"),
        (
            ["algorithm.correction={also: [{kind: reject, high: 1}]}"],
            "algorithm.correction.kind",
            "is none, and algorithm.correction.also is set",
        ),
        (
            [
                "algorithm.correction={kind: token_mask, also: [{kind: reject, low: 2, high: 1}]}"
            ],
            "algorithm.correction.also.0.low",
            "below high",
        ),
        (
            ["algorithm.correction={kind: token_mask, also: [{}]}"],
            "algorithm.correction.also.0.kind",
            "Name one",
        ),
        (
            ["algorithm.name=dppo_tv", G, "algorithm.correction.kind=token_mask"],
            LAST,
            "is to the engine's policy already",
        ),
        (
            ["algorithm.dynamic_sampling.max_rounds=2"],
            LAST,
            "metric is null. Use metric: accuracy",
        ),
        (
            ["algorithm.dynamic_sampling.metric=acuracy", "algorithm.group_size=2"],
            "algorithm.dynamic_sampling.metric",
            "there are: accuracy, reward, exact_match. Did you mean `accuracy`?",
        ),
        (
            ["algorithm.dynamic_sampling.metric=accuracy"],
            "algorithm.group_size",
            "which needs at least 2",
        ),
        (
            [
                G,
                "algorithm.dynamic_sampling={metric: reward, max_rounds: 2, prompts_per_round: 31}",
            ],
            "algorithm.dynamic_sampling.prompts_per_round",
            "62 prompts, fewer than data.prompts_per_step=64",
        ),
        (
            [G, "algorithm.dynamic_sampling={metric: reward, if_short: ignore}"],
            "algorithm.dynamic_sampling.if_short",
            "allowed: fill, stop",
        ),
        (["environment.max_turns=2"], LAST, "environment.name is null"),
        (["environment.name=geuss"], LAST, "Did you mean `guess`?"),
        (
            ["environment={name: guess, options: {hihger: up}}"],
            "environment.options",
            "takes higher, lower, unreadable, turn_cost",
        ),
        (
            ["environment={name: tools, options: {tools: [calculater]}}"],
            "environment.options",
            "there are: calculator",
        ),
        (
            ["environment={name: tools, options: {call: '(a'}}"],
            "environment.options",
            "no regular expression",
        ),
        (
            ["environment={name: tools, options: {call: 'a'}}"],
            "environment.options",
            "needs one group",
        ),
        (
            ["environment={name: tools, options: {allow: [net]}}"],
            "environment.options",
            "allow knows network",
        ),
        (
            ["environment={name: guess, max_turn_tokens: 300}"],
            "environment.max_turn_tokens",
            "more than rollout.sampling.max_tokens=256",
        ),
        (
            ["environment={name: guess, max_turns: 300}"],
            "environment.max_turns",
            "no token for each turn",
        ),
        (["mix=[{update: rejecton}]"], "mix.0.update", "Did you mean `rejection`?"),
        (
            [G, "mix=[{update: rejection, judge: exact}]"],
            "mix.0.judge",
            "Did you mean `exact_match`?",
        ),
        (
            ["mix=[{update: rejection}]"],
            "algorithm.group_size",
            "takes the best response of a group",
        ),
        (
            [G, "mix=[{update: reward_model, judge: exact_match}]"],
            "mix.0.update",
            "0 entries of reward have a path",
        ),
        (
            [G, "mix=[{update: preference}]", "preference.loss=kto"],
            LAST,
            "not of pairs",
        ),
        (
            [G, "mix=[{update: preference}]", "preference.loss=dop"],
            LAST,
            "Did you mean `dpo`?",
        ),
        (
            [G, "mix=[{update: preference}]", "preference.options.bta=1"],
            LAST,
            "Did you mean `beta`",
        ),
        (
            ["environment={name: guess, agents: own}"],
            "environment.agents",
            "has one agent only",
        ),
        (
            ["environment={name: signals, agents: own}", "trainer.rollout_only=true"],
            LAST,
            "an actor of its own",
        ),
        (
            [
                "environment={name: guess}",
                G,
                "algorithm={name: dapo, dynamic_sampling: {metric: acc}}",
            ],
            "algorithm.dynamic_sampling.metric",
            "there are: accuracy, reward, exact_match",
        ),
        (
            ["environment.name=guess", "algorithm.name=remax"],
            "environment.name",
            "there is none of an episode",
        ),
        (["algorithm.kl.straight_through=true"], LAST, "has none"),
        (
            ["algorithm.group_size=2", "algorithm.rollout_filter=best_and_worst"],
            LAST,
            "nothing is dropped",
        ),
        (["algorithm.rollout_filter=best"], LAST, "best_and_worst"),
        (["algorithm.entropy_step=0.1"], LAST, "the weight is fixed. Set a target"),
        (
            ["algorithm.entropy_target=0.2", "placement={actor: [0], rollout: [1]}"],
            "algorithm.entropy_target",
            "is set, and so is placement",
        ),
        (["algorithm.top_entropy=1.0"], LAST, "below 1"),
        (["algorithm.kl.score_function=true"], LAST, "has none"),
        (
            [
                "algorithm.kl={in: loss, coef: 0.1, straight_through: true, importance_weighted: true}"
            ],
            "algorithm.kl.importance_weighted",
            "is set, and so is straight_through",
        ),
        (
            ["algorithm.kl={in: loss, coef: 0.1, kind: k3, score_function: true}"],
            "algorithm.kl.kind",
            "on average for k1 alone",
        ),
        (
            ["algorithm.name=distillation"],
            "reference.path",
            "would teach the actor to stay as it is",
        ),
        (
            [*N, "algorithm.opponent_beta=null"],
            LAST,
            "only nash_md compares with opponents",
        ),
        (
            ["algorithm.name=grpo", G, "algorithm.opponent_beta=0.5"],
            LAST,
            "only nash_md",
        ),
        ([*N, "rollout.engine=vllm"], LAST, "draws from one model. Use hf"),
        ([*N, "algorithm.group_size=3"], LAST, "half of each group are opponents"),
        ([*N, IN_REWARD], "algorithm.kl.in", "would count in who is preferred"),
        (
            [*N, "environment.name=guess"],
            LAST,
            "a response that is continued is the policy's own",
        ),
        ([*N, "rollout.partial=true"], LAST, "a response that is continued"),
        (
            ["algorithm.name=grpo", G, OTHER],
            "reference.tokenizer",
            "compared by its text; grpo reads",
        ),
        (
            [*D, "algorithm.distillation={divergence: reverse_kl, top_k: 8}"],
            f"{TAUGHT}.divergence",
            "no probabilities",
        ),
        (
            [*D, "algorithm.kl={in: loss, coef: 0.1}"],
            "algorithm.kl.in",
            "cannot be combined with reference.tokenizer",
        ),
        (
            [*D, "mix=[{update: preference}]", G],
            "mix",
            "no log-probs of both responses of a pair",
        ),
        ([*D, "rollout.sampling.top_k=5"], LAST, "the teacher's over all of its own"),
        ([*D, "rollout.adaptive_sampling=true"], LAST, "its rules have top_k"),
        ([*D, "environment.name=guess"], LAST, "written in the student's tokens"),
        ([*D, "data.tools=tools.json"], LAST, "without tools"),
        (["algorithm.critic_warmup_steps=100"], LAST, "would never be updated"),
        (
            [
                "algorithm.name=pass_at_k",
                G,
                "algorithm.advantage_options.k=2",
                IN_REWARD,
            ],
            "algorithm.kl.in",
            "a right response counts as wrong",
        ),
        (
            [
                "algorithm.name=raft",
                G,
                "algorithm.advantage_options.right_from=1.0",
                IN_REWARD,
            ],
            "algorithm.kl.in",
            "a right response counts as wrong",
        ),
        (
            ["algorithm.name=raft", G, "algorithm.advantage_options.keep=4"],
            LAST,
            "all of",
        ),
        (
            ["algorithm.name=reinforce_plus_plus", "data.prompts_per_step=1"],
            LAST,
            "compares a response with the others of its step",
        ),
        (
            ["algorithm.name=grpo", G, "algorithm.lam=0.5"],
            LAST,
            "which grpo does not read",
        ),
        (
            ["algorithm.name=opo", G, "algorithm.gamma=0.5"],
            LAST,
            "which opo does not read",
        ),
        (
            ["algorithm.name=rloo", G, "algorithm.normalize_by_std=false"],
            LAST,
            "which rloo does not read",
        ),
        (
            ["algorithm.name=remax", "algorithm.bootstrap_truncated=true"],
            LAST,
            "found true, which remax does not read.",
        ),
        (
            ["algorithm.name=remax", "algorithm.normalize_advantages=false"],
            LAST,
            "which remax does not read",
        ),
        (
            ["algorithm.gamma=0.9", "algorithm.advantage_options.gamma=0.8"],
            LAST,
            "so is algorithm.gamma",
        ),
        (["algorithm.loss_length=9"], LAST, "which token_mean does not read"),
        (
            ["algorithm.clip_range=1.5"],
            LAST,
            "as clip_low of ppo_clip expected at least 0 and at",
        ),
        (
            ["algorithm={clip_range_high: 0.3, policy_loss_options: {clip_high: 0.2}}"],
            "algorithm.policy_loss_options.clip_high",
            "so is algorithm.clip_range_high",
        ),
        (
            [
                "algorithm={policy_loss: dual_clip, clip_range: 0.3, policy_loss_options: {clip_dual: 1.3}}"
            ],
            "algorithm.policy_loss_options.clip_dual",
            "above 1 + clip_high, 1.3",
        ),
        (
            ["algorithm.kl={in: loss, coef: 0.1, gain: 0.5}"],
            "algorithm.kl.gain",
            "coef is fixed",
        ),
        (
            ["algorithm={advantage: none, kl: {in: loss, coef: 0.1}}"],
            "algorithm.advantage",
            "no algorithm.kl in: loss to another reference",
        ),
        (
            ["algorithm={policy_loss: policy_gradient, num_epochs: 2}"],
            "algorithm.num_epochs",
            "no ratio",
        ),
        (
            ["algorithm.name=gpg", G, "algorithm.num_epochs=3"],
            LAST,
            "Use 1, or a policy loss with",
        ),
        (["algorithm.value_loss=cliped"], LAST, "Did you mean `clipped`?"),
        (["algorithm.value_loss_options.clip=1"], LAST, "no such option"),
        (["algorithm.value_loss_options.clip_range=0"], LAST, "above 0"),
        (
            [
                "algorithm={value_clip_range: 0.1, value_loss_options: {clip_range: 0.3}}"
            ],
            "algorithm.value_loss_options.clip_range",
            "so is algorithm.value_clip_range",
        ),
        (["algorithm.name=grpo", G, "algorithm.value_loss=a:b"], LAST, "no critic"),
        (["algorithm.token_selector=kl_cov"], LAST, "ppo_clip does not read selected"),
        (
            ["algorithm.name=kl_cov", G, "algorithm.token_selector=clip_kov"],
            LAST,
            "Did you mean `clip_cov`",
        ),
        (
            ["mix=[{update: sft, judge: exact_match}]"],
            "mix.0.judge",
            "nothing is judged",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(mistakes, overrides, key, said):
    found, key = mistakes(*overrides), key or overrides[-1].partition("=")[0]
    assert said in found[key]
    assert set(found) == {key}


def test_remax_needs_an_engine_for_its_greedy_rollout(mistakes, tmp_path):
    (tmp_path / "rollouts").mkdir()
    found = mistakes(
        "algorithm.name=remax", f"trainer.replay_rollouts={tmp_path / 'rollouts'}"
    )
    assert "whose baseline is a greedy rollout" in found["algorithm.advantage"]


def test_near_what_is_refused_stands_what_is_not(load):
    for given in (
        [
            "algorithm.name=raft",
            G,
            "algorithm.advantage_options={keep: 4, right_from: 1.0}",
        ],
        ["algorithm.name=raft", G, IN_REWARD],
        [
            "algorithm.name=turn_grpo",
            G,
            "environment.name=guess",
            "algorithm={gamma: 0.9, normalize_by_std: false}",
        ],
        ["algorithm.critic_warmup_steps=99"],
        ["algorithm.name=raft", G, "algorithm={num_epochs: 2, num_mini_batches: 2}"],
        [
            "algorithm={policy_loss: importance_sampling, num_epochs: 2, num_mini_batches: 2}"
        ],
        ["algorithm.name=gkd", G, T, "algorithm.num_mini_batches=2"],
        ["algorithm={policy_loss: dual_clip, policy_loss_options: {clip_dual: 1.3}}"],
        ["algorithm={advantage: none, kl: {in: loss, coef: 0.1}}", T],
        # What switches a recipe's penalty off.
        ["algorithm.kl={in: none, coef: 0.0, kind: k1, gain: 0.5}"],
        ["algorithm.kl={in: reward, coef: 0.1, kind: k2, allow_biased: true}"],
        ["algorithm.kl={in: reward, coef: 0.1, allow_biased: true}"],
        ["algorithm={loss_aggregation: fixed_length, loss_length: 9}"],
        ["algorithm.name=reinforce_plus_plus", G, "data.prompts_per_step=1"],
    ):
        assert load(*given).warnings == (), given


@pytest.mark.parametrize(
    "name", ["gpg", "distillation", "remax, policy_loss: policy_gradient"]
)
def test_a_loss_without_a_ratio_wants_one_update_a_step(load, name):
    [said] = load(f"algorithm={{name: {name}, num_mini_batches: 2}}", G, T).warnings
    assert "algorithm.num_mini_batches=2: " in said and "off-policy" in said
    assert load(f"algorithm={{name: {name}}}", G, T).warnings == ()
    assert (
        load("algorithm={name: gpg, num_mini_batches: 2}", G, command="sft").warnings
        == ()
    )


def test_values_that_grow_without_bound_are_warned_of(load):
    [said] = load("algorithm={name: ppo, bootstrap_truncated: true}", T).warnings
    assert (
        "algorithm.bootstrap_truncated=true with algorithm.gamma=1" in said
        and "Lower gamma" in said
    )
    assert (
        load(
            "algorithm={name: ppo, bootstrap_truncated: true, gamma: 0.99}", T
        ).warnings
        == ()
    )


def test_the_estimator_of_the_kl_is_that_of_its_place(load):
    for place, kind in (("reward", "k1"), ("loss", "k3")):
        assert (
            load(f"algorithm.kl={{in: {place}, coef: 0.1}}").algorithm.kl.kind_name
            == kind
        )


def test_k1_in_a_loss_with_its_gradient_from_k2(load):
    assert load(
        "algorithm.kl={in: loss, coef: 0.1, kind: k1, straight_through: true}"
    ).uses_reference


def test_functions_of_the_users_own(load, mistakes, tmp_path, monkeypatch):
    (tmp_path / "my_algorithms_for_test.py").write_text(
        "from elsewhere import made\n"
        "raise RuntimeError('not imported by a check')\n"
        "def credit(rewards, values, response_mask, *, strength: float = 1.0): ...\n"
        "def odd(rewards, weather): ...\n"
        "def chosen(log_probs, selected, weights, *, sharpness: float = 1.0): ...\n"
        "def largest(log_probs, response_mask, *, share: float): ...\n"
        "def error(values, returns, weights, *, scale: float = 1.0): ...\n"
        "def strict(response_mask, denominators, *, sharpness: float): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = "algorithm.advantage=my_algorithms_for_test"
    assert load(f"{own}:credit", "algorithm.advantage_options.strength=2.0").uses_critic
    # Nobody can tell.
    assert not load(f"{own}:made", "algorithm.advantage_options={}").uses_critic
    assert user_function_signature("my_algorithms_for_test:made") is None
    assert (
        "expected float"
        in mistakes(
            f"{own}:credit", "algorithm.advantage_options.strength=x"
        ).popitem()[1]
    )
    assert "reads weather" in mistakes(f"{own}:odd")["algorithm.advantage"]
    for key in (
        "loss_aggregation",
        "correction.kind",
        "policy_loss",
        "distillation.divergence",
        "kl.kind",
        "value_loss",
    ):
        said = mistakes(f"algorithm.{key}=my_algorithms_for_test:odd", T)[
            f"algorithm.{key}"
        ]
        assert "reads" in said and "weather" in said, key
    strict = "my_algorithms_for_test:strict"
    assert (
        "needs the option sharpness"
        in mistakes(f"algorithm.loss_aggregation={strict}")[
            "algorithm.loss_aggregation"
        ]
    )
    assert (
        "has no function 'creidt'" in mistakes(f"{own}:creidt")["algorithm.advantage"]
    )
    loss = "algorithm.policy_loss=my_algorithms_for_test:chosen"
    assert (
        "has no selector of its own. Name one"
        in mistakes(loss)["algorithm.policy_loss"]
    )
    selector = "algorithm.token_selector=my_algorithms_for_test:largest"
    assert "needs it" in mistakes(loss, selector)["algorithm.policy_loss_options.share"]
    assert load(
        loss, selector, "algorithm.policy_loss_options={share: 0.5, sharpness: 2.0}"
    )
    critic = "algorithm.value_loss=my_algorithms_for_test:error"
    assert load(
        critic, "algorithm.value_loss_options.scale=2.0"
    ).algorithm.value_loss.endswith("error")
    assert (
        "has no clip_range"
        in mistakes(critic, "algorithm.value_clip_range=null")[
            "algorithm.value_clip_range"
        ]
    )
    assert (
        "is not found"
        in mistakes("algorithm.policy_loss=no_such_module_for_test:f")[
            "algorithm.policy_loss"
        ]
    )


def test_a_resolved_configuration_is_read_again(load, tmp_path):
    from megaverl.config import load_config

    for name in ("ppo", "gspo", "dppo_kl"):
        config = load(f"algorithm={{name: {name}, group_size: 4}}")
        (tmp_path / "resolved.yaml").write_text(config.to_yaml())
        assert load_config(tmp_path / "resolved.yaml") == config
