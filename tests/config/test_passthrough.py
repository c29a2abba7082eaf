"""Mappings for megatron-core and vLLM, against what is installed here: read without importing, right all the same."""

from __future__ import annotations

import dataclasses
import inspect
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from packaging.version import Version

from megaverl.config import passthrough
from megaverl.config.passthrough import TARGETS, PassthroughClass
from megaverl.config.signatures import class_fields, source_file
from megaverl.config.wording import nearest
from megaverl.config.yaml_source import MISSING, put, take, value_at
from megaverl.platform import platform
from tests.launcher import Launcher


def test_the_fields_that_are_read_are_the_fields_that_are_there():
    platform.adapt_megatron()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.transformer_config import TransformerConfig

    for name, cls in (
        ("megatron", TransformerConfig),
        ("optimizer", OptimizerConfig),
        ("ddp", DistributedDataParallelConfig),
    ):
        assert set(TARGETS[name].fields()) == {
            field.name for field in dataclasses.fields(cls)
        }
    arguments = list(inspect.signature(OptimizerParamScheduler.__init__).parameters)[1:]
    assert list(TARGETS["scheduler"].fields()) == arguments


def test_vllms_fields_too(launch: Launcher):
    """In a process of its own: importing vLLM here would turn this one's logging and environment."""
    [[engine, sampling]] = launch.ranks(
        1, "tests.config.test_passthrough:fields_of_vllm"
    ).check()
    assert set(TARGETS["vllm"].fields()) == set(engine)
    assert set(TARGETS["sampling"].fields()) == set(sampling)


def fields_of_vllm() -> list[list[str]]:
    platform.adapt_vllm()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams

    return [
        [field.name for field in dataclasses.fields(EngineArgs)],
        list(SamplingParams.__struct_fields__),
    ]


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_what_megaverl_owns_is_there_to_be_owned(target: PassthroughClass):
    """In one of the versions of megatron-core that are supported: 0.16 lacks some, of 0.19's one is gone."""
    missing = set(target.owned) - set(target.fields())
    if target.distributions == ("megatron-core",) and Version(
        version("megatron-core")
    ) < Version("0.19"):
        assert (
            not missing & {"timers", "optimizer", "preserve_fp32_weights"}
            and len(missing) < len(target.owned) * 2 / 3
        )
    else:
        assert missing <= {"preserve_fp32_weights", "muon_use_nesterov"}
    assert target.settable()


@pytest.mark.parametrize(
    ("part", "names"),
    [
        (
            "megatron",
            r"^(dsa_indexer|linear_(att|conv|key|num|value)|mamba_(state|head|num)|mtp_|qk_clip)|router_force",
        ),
        (
            "megatron",
            r"^moe_router_(topk|num_groups|group_topk|pre_softmax|score_function)|rotary_interl|softmax_[st]",
        ),
        (
            "megatron",
            r"glu_interleave|single_grouped|weight_remat|num_weight_shards|^mup_|_scale_func$|rank_capacity",
        ),
        ("ddp", r"fsdp|fp[48]_param|num_buckets"),
    ],
)
def test_what_neither_layouts_nor_engines_know_is_owned_in_every_version(
    part: str, names: str
):
    """Accepted, it would train another policy than is sampled, or do nothing."""
    fields = {name for name in TARGETS[part].fields() if re.search(names, name)}
    assert fields and not fields - TARGETS[part].owned.keys()


def test_own_defaults_fit_their_annotations():
    """The types that annotations become, over every default of the real classes that is a plain literal."""
    import ast

    checked = 0
    for target in TARGETS.values():
        for field in target.fields().values():
            if (
                isinstance(field.default, ast.Constant)
                and field.default.value is not Ellipsis
            ):
                checked += 1
                assert field.accepts(field.default.value), (
                    target.name,
                    field.name,
                    field.type_text,
                )
    assert checked > 300


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        (
            "actor.megatron.recompute_granularity=ful",
            "recompute_granularity",
            "allows full, selective. Did you mean",
        ),
        (
            "actor.megatron.attention_backend=flsh",
            "attention_backend",
            "Did you mean `flash`?",
        ),
        ("actor.megatron.hidden_dropout=high", "hidden_dropout", "takes float"),
        (
            "actor.megatron.sequence_paralel=true",
            "sequence_paralel",
            "Did you mean `sequence_parallel`?",
        ),
        ("actor.megatron.autocast_dtype=int3", "autocast_dtype", "bfloat16"),
        ("actor.megatron.init_method=normal", "init_method", "module:function"),
        ("actor.megatron.recompute_modules=mlp", "recompute_modules", "takes"),
        ("actor.megatron.lr=1", "lr", "Did you mean `actor.optimizer.lr`?"),
        (
            "actor.megatron.tensor_model_parallel_size=2",
            "tensor_model_parallel_size",
            "Use actor.tp.",
        ),
        ("actor.megatron.pipeline_dtype=bf16", "pipeline_dtype", "Use model.dtype."),
        ("actor.megatron.num_layers=2", "num_layers", "config.json"),
        ("actor.megatron.window_size=[4, 4]", "window_size", "config.json"),
        (
            "rollout.vllm.hf_overrides={rope_theta: 1}",
            "hf_overrides",
            "change config.json",
        ),
        (
            "rollout.vllm.override_generation_config={top_k: 1}",
            "override_generation_config",
            "rollout.sampling",
        ),
        ("reference.megatron.moe_router_topk=1", "moe_router_topk", "config.json"),
        (
            "actor.megatron.moe_router_force_load_balancing=true",
            "moe_router_force_load_balancing",
            "other experts",
        ),
        ("actor.megatron.mtp_num_layers=1", "mtp_num_layers", "not trained here"),
        ("critic.megatron.qk_clip=true", "qk_clip", "without it"),
        (
            "actor.megatron.calculate_per_token_loss=true",
            "calculate_per_token_loss",
            "algorithm.loss_aggregation",
        ),
        (
            "critic.megatron.context_parallel_size=2",
            "context_parallel_size",
            "Use critic.cp.",
        ),
        (
            "actor.megatron.hybrid_context_parallel=true",
            "hybrid_context_parallel",
            "the same actor.cp ranks",
        ),
        ("reference.megatron.nope=2", "nope", "no such field"),
        ("actor.optimizer.lr=fast", "lr", "takes Optional[float]"),
        ("critic.optimizer.bf16=true", "bf16", "Use model.dtype."),
        ("actor.scheduler.max_lr=1.0", "max_lr", "Use actor.optimizer.lr."),
        ("actor.scheduler.lr_warmup=1", "lr_warmup", "Did you mean `lr_warmup_steps`?"),
        (
            "actor.ddp.overlap_grad_reduc=true",
            "overlap_grad_reduc",
            "Did you mean `overlap_grad_reduce`?",
        ),
        (
            "actor.ddp.data_parallel_sharding_strategy=optim",
            "data_parallel_sharding_strategy",
            "actor.engine: fsdp",
        ),
        (
            "critic.ddp.outer_dp_sharding_strategy=optim",
            "outer_dp_sharding_strategy",
            "Only Megatron's FSDP reads it",
        ),
        ("actor.ddp.bucket_size=1e6", "bucket_size", "takes Optional[int]"),
        (
            "rollout.vllm.gpu_memory_utilisation=0.5",
            "gpu_memory_utilisation",
            "Did you mean `gpu_memory_utilization`?",
        ),
        (
            "rollout.vllm.gpu_mem=0.5",
            "gpu_mem",
            "Did you mean `gpu_memory_utilization`?",
        ),
        (
            "rollout.vllm.tensor_parallel_size=2",
            "tensor_parallel_size",
            "Use rollout.tp.",
        ),
        ("rollout.vllm.seed=2", "seed", "Use run.seed."),
        ("rollout.vllm.model=2", "model", "Use model.path."),
        ("rollout.vllm.kv_cache_dtype=fp9", "kv_cache_dtype", "allows auto"),
        ("rollout.vllm.max_num_seqs=1.5", "max_num_seqs", "takes int | None"),
        ("rollout.vllm.enable_lora=true", "enable_lora", "updated in place"),
        ("rollout.vllm.enforce_eager=1", "enforce_eager", "takes bool"),
        ("actor.ddp.overlap_grad_reduce=1", "overlap_grad_reduce", "takes bool"),
        ("rollout.sampling.n=4", "n", "algorithm.group_size"),
        ("rollout.sampling.seed=4", "seed", "run.seed"),
        ("rollout.sampling.top_k='1'", "top_k", "takes int"),
        ("rollout.sampling.logit_bias={a: 1}", "logit_bias", "takes dict[int, float]"),
        (
            "rollout.vllm.runner=generat",
            "runner",
            "allows auto, generate, pooling, draft. Did you mean `generate`?",
        ),
        (
            "critic.optimizer.optimizer=dist_muon",
            "optimizer",
            "Use muon: ddp.use_distributed_optimizer",
        ),
        (
            "reward_model.optimizer.optimizer=adaptive_muon",
            "optimizer",
            "no layout of its state",
        ),
        ("actor.optimizer.optimizer=lion", "optimizer", "Allowed: adam, sgd, muon."),
        (
            "actor.optimizer.optimizer=adamw",
            "optimizer",
            "megatron-core's adam decays weights as AdamW does.",
        ),
        (
            "actor.optimizer.exp_avg_dtype=int8",
            "exp_avg_dtype",
            "Allowed: float32, fp32",
        ),
        ("critic.optimizer.optimizer=adm", "optimizer", "Did you mean `adam`?"),
        (
            "actor.optimizer.muon_momentum=0.9",
            "muon_momentum",
            "only Muon reads it. Leave it out, or set actor.optimizer.optimizer: muon",
        ),
        (
            "actor.optimizer.lion_beta1=0.9",
            "lion_beta1",
            "Its optimizer is not built: use adam, sgd or muon.",
        ),
        (
            "actor.scheduler.lr_decay_style=cosin",
            "lr_decay_style",
            "Did you mean `cosine`?",
        ),
        (
            "actor.scheduler.wd_incr_style=step",
            "wd_incr_style",
            "Allowed: constant, linear, cosine.",
        ),
        ("actor.scheduler.lr_wsd_decay_style=sqrt", "lr_wsd_decay_style", "minus_sqrt"),
        (
            "actor.megatron.recompute_modules=[mlp, attn]",
            "recompute_modules",
            "found 'attn'",
        ),
        ("actor.megatron.offload_modules=[all]", "offload_modules", "core_attn"),
        ("actor.megatron.cp_comm_type=ring", "cp_comm_type", "p2p"),
        (
            "actor.megatron.moe_router_load_balancing_type=sinkhorn",
            "moe_router_load_balancing_type",
            "aux_loss",
        ),
        ("rollout.vllm.load_format=dummy", "load_format", "safetensors"),
        ("rollout.vllm.model_impl=vlm", "model_impl", "Did you mean `vllm`?"),
        ("rollout.vllm.config_format=mistral", "config_format", "auto, hf"),
        ("rollout.sampling.stop_token_ids=[a]", "stop_token_ids", "list[int] | None"),
        (
            "trainer.validation_sampling.temprature=0",
            "temprature",
            "Did you mean `temperature`?",
        ),
    ],
)
def test_one_wrong_field(mistakes, override, key, said):
    found = mistakes(override)
    full = override.partition("=")[0]
    assert full.endswith(key)
    assert set(found) == {full}
    assert said in found[full]


@pytest.mark.parametrize(
    ("fields", "key", "said"),
    [
        ("muon_num_ns_steps: 0", "optimizer.muon_num_ns_steps", "at least 1"),
        ("muon_tp_mode: block", "optimizer.muon_tp_mode", "Did you mean `blockwise`?"),
        (
            "muon_scale_mode: kimi",
            "optimizer.muon_scale_mode",
            "Allowed: spectral, unit_rms_norm, shape_scaling.",
        ),
        ("muon_momentum: 1.0", "optimizer.muon_momentum", "below 1"),
        (
            "optimizer_cpu_offload: true",
            "optimizer.optimizer_cpu_offload",
            "with adam only",
        ),
        (
            "use_precision_aware_optimizer: true",
            "optimizer.use_precision_aware_optimizer",
            "with adam only",
        ),
        (
            "muon_use_nesterov: true",
            "optimizer.muon_use_nesterov",
            "Use actor.optimizer.muon_nesterov",
        ),
    ],
)
def test_one_wrong_field_of_muon(mistakes, fields, key, said):
    found = mistakes(f"actor.optimizer={{optimizer: muon, {fields}}}")
    assert set(found) == {f"actor.{key}"}
    assert said in found[f"actor.{key}"]


def test_muon_needs_a_dtype_without_loss_scaling(mistakes, load):
    muon = "actor.optimizer.optimizer=muon"
    assert load(muon, "model.dtype=bfloat16").actor.optimizer["optimizer"] == "muon"
    found = mistakes(muon, "model.dtype=float16")
    assert "Use bfloat16" in found["model.dtype"]
    assert "tested with adam only" in str(mistakes(muon, "placement.actor_islands=2"))
    found = mistakes(muon, "actor.engine=fsdp")
    assert "steps with torch's AdamW" in found["actor.optimizer.optimizer"]


@given(st.data())
def test_a_shortened_name_suggests_one_that_begins_alike(data: st.DataObject):
    names = sorted(data.draw(st.sampled_from(list(TARGETS.values()))).settable())
    parts = data.draw(st.sampled_from(names)).split("_")
    kept = data.draw(st.integers(1, len(parts)))
    short = "_".join(
        part[: data.draw(st.integers(1, len(part)))] for part in parts[:kept]
    )
    assume(len(short) > 2)
    suggested = nearest(short, names)
    assert suggested is not None
    assert all(
        whole.startswith(part)
        for part, whole in zip(short.split("_"), suggested.split("_"), strict=False)
    )


def test_values_that_are_allowed_are_those_that_are_built():
    """Schedules are asked for a learning rate and a weight decay; megatron-core refuses others there."""
    platform.adapt_megatron()
    import torch
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    options = {
        "init_lr": 0.0,
        "max_lr": 1.0,
        "min_lr": 0.0,
        "lr_warmup_steps": 1,
        "lr_decay_steps": 4,
    }
    options |= {
        "start_wd": 0.0,
        "end_wd": 0.1,
        "wd_incr_steps": 4,
        "wsd_decay_steps": 2,
    }

    def step(**styles: str) -> None:
        chosen = {"lr_decay_style": "linear", "wd_incr_style": "linear", **styles}
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = OptimizerParamScheduler(optimizer, **options, **chosen)
        for _ in range(4):
            scheduler.step(increment=1)

    for style in passthrough.SCHEDULER_VALUES["lr_decay_style"]:
        step(
            lr_decay_style=style,
            **({"lr_wsd_decay_style": "linear"} if style == "WSD" else {}),
        )
    for style in passthrough.SCHEDULER_VALUES["lr_wsd_decay_style"]:
        step(lr_decay_style="WSD", lr_wsd_decay_style=style)
    for style in ("linear", "cosine"):
        step(wd_incr_style=style)
    with pytest.raises(Exception, match="not supported"):
        step(lr_decay_style="step")


def test_right_fields_of_every_kind(load):
    config = load(
        "actor.megatron={recompute_granularity: selective, attention_backend: auto, hidden_dropout: 0, "
        "recompute_modules: [core_attn], autocast_dtype: torch.bfloat16, "
        "init_method: 'torch.nn.init:zeros_', moe_router_dtype: null}",
        "actor.optimizer={use_precision_aware_optimizer: true, exp_avg_dtype: bf16}",
        "actor.ddp={bucket_size: null, overlap_grad_reduce: true, data_parallel_sharding_strategy: no_shard}",
        "rollout.vllm={gpu_memory_utilization: 1, kv_cache_dtype: auto, compilation_config: {level: 0}}",
        "rollout.vllm.runner=generate",
        "rollout.sampling={logit_bias: {5: 1.5}, allowed_token_ids: [1, 2], min_p: 0}",
    )
    assert config.actor.megatron["recompute_modules"] == ["core_attn"]
    window = TARGETS["megatron"].fields()["window_size"]
    assert window.accepts([4, 4]) and not window.accepts([1, 2, 3])
    assert config.rollout.sampling["logit_bias"] == {5: 1.5}


def test_an_absent_package_is_one_warning(load, monkeypatch):
    places = {
        key: dataclasses.replace(target, module="not_installed")
        if "vllm" in target.distributions
        else target
        for key, target in passthrough.PLACES.items()
    }
    monkeypatch.setattr(passthrough, "PLACES", places)
    config = load("rollout.vllm.not_known_here=1", "rollout.sampling.neither_this=2")
    assert config.warnings == (
        "vllm is not installed: rollout.sampling, rollout.vllm could not be checked",
    )
    with pytest.raises(ValueError, match="Use rollout.tp"):
        _as_value_error(load, "rollout.vllm.tensor_parallel_size=1")


def _as_value_error(load, override):
    from megaverl.errors import ConfigError

    try:
        load(override)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def test_locating_a_module_runs_nothing_of_it(tmp_path, monkeypatch):
    package = tmp_path / "loud_package" / "inner"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "config.py").write_text(
        "from .base import Base\n"
        "class Settings(Base):\n"
        "    own: int = 1\n"
        '    """Its line."""\n'
        "    kind: Kind = None\n"
        "class Maker:\n"
        "    def __init__(self, first: int, *, second: str = 'x'): ...\n"
    )
    (package / "base.py").write_text(
        "class Base:\n    inherited: bool = False\n    shared: 'ClassVar[int]' = 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    fields = class_fields("loud_package.inner.config", "Settings")
    assert fields is not None and list(fields) == ["inherited", "own", "kind"]
    assert fields["own"].description == "Its line."
    assert list(class_fields("loud_package.inner.config", "Maker") or {}) == [
        "first",
        "second",
    ]
    assert class_fields("loud_package.inner.config", "Nothing") is None
    assert class_fields("no_such_package_at_all.x", "Nothing") is None
    assert source_file("loud_package.inner.config") == (
        Path(package / "config.py"),
        False,
    )


@given(
    value=st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        ),
        max_leaves=6,
    )
)
def test_no_value_breaks_the_check(value):
    for name in ("lr", "params_dtype", "optimizer", "use_distributed_optimizer"):
        assert TARGETS["optimizer"].fields()[name].accepts(value) in (True, False)
    for name in (
        "window_size",
        "recompute_granularity",
        "attention_backend",
        "init_method",
        "moe_layer_freq",
    ):
        assert TARGETS["megatron"].fields()[name].accepts(value) in (True, False)
    for name in ("logit_bias", "stop", "structured_outputs"):
        assert TARGETS["sampling"].fields()[name].accepts(value) in (True, False)


@pytest.mark.parametrize(
    ("annotation", "right", "wrong"),
    [
        ("int", [1, -3], [True, 1.0, "1", None]),
        ("float", [1, 0.5], [True, "0.5"]),
        ("int | None", [1, None], ["null"]),
        ("Optional['Kind']", ["a", "b", 3, None], ["c", True]),
        ("Literal['auto', Kind]", ["auto", "a", 3], ["c", None]),
        ("Colour", ["red"], ["green", "_hidden", 1]),
        ("tuple[int, str]", [[1, "a"]], [[1], ["a", 1], [1, "a", 2], "ab"]),
        ("Tuple[int, ...]", [[], [1, 2]], [["a"], 1]),
        ("set[str]", [["a"]], ["a", [1]]),
        ("Sequence[float]", [[1, 0.5]], [["a"], 1.0]),
        ("Dict[int, List[str]]", [{1: ["a"]}, {"2": []}], [{"a": []}, {1: [1]}, []]),
        ("Callable[[int], str]", ["module:function"], ["function", 1]),
        ("torch.dtype", ["bf16", "torch.float32"], ["float31", "torch.", 16]),
        ("Annotated[int, Limits(ge=0)]", [1], ["a"]),
        ("Tree", [{"a": 1}, "a"], []),  # it names itself: unclear
        ("Unknown[int]", [1, "a", None], []),
        ("ClassOfNoKnownShape", [{"a": 1}, 1], []),
        ("Elsewhere", [{"a": 1}, 1], []),
    ],
)
def test_an_annotation_becomes_a_type(tmp_path, annotation, right, wrong):
    file = tmp_path / "settings.py"
    file.write_text(
        "from .nowhere import Elsewhere\n"
        "Kind = Literal['a', 'b', 3]\nTree = Dict[str, 'Tree']\nclass ClassOfNoKnownShape: ...\n"
        "class Colour(Enum):\n    red = 1\n    _hidden = 2\n"
        f"class Settings:\n    value: {annotation}\n    left_out: int = None\n"
    )
    fields = class_fields(str(file), "Settings")
    assert (
        fields is not None
        and fields["left_out"].accepts(None)
        and not fields["left_out"].accepts("a")
    )
    assert [value for value in right if not fields["value"].accepts(value)] == []
    assert [value for value in wrong if fields["value"].accepts(value)] == []


@given(
    st.lists(st.text("abc", min_size=1, max_size=1), min_size=1, max_size=3),
    st.integers(),
)
def test_what_is_put_is_found_and_taken(path, value):
    values: dict[str, Any] = {"z": {"kept": 1}}
    assert put(values, path, value) and value_at(values, path) == value
    assert take(values, path) == value
    assert values == {"z": {"kept": 1}}
    assert take(values, path) is value_at(values, ["z", "kept", "below"]) is MISSING
    assert not put(values, ["z", "kept", "below"], value)
