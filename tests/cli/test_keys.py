"""Completion: what a shell is offered, and a real bash that takes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megaverl.cli.keys import words
from megaverl.cli.main import COMMANDS, main
from megaverl.config.passthrough import PLACES


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ([""], list(COMMANDS)),
        (["tr"], ["train", "trace"]),
        (["train", "actor.optim"], ["actor.optimizer="]),
        (["train", "rol"], ["rollout."]),
        (["keys", "algorithm.kl.co"], ["algorithm.kl.coef"]),
        (["report", "--ou"], ["--output"]),
        (["train", "--dr"], ["--dry-run"]),
        (["check-plugin", "rew"], ["reward"]),
        (["report", "runs/"], []),
        (["nothing", "--x"], []),
    ],
)
def test_what_is_offered(typed: list[str], offered: list[str]) -> None:
    assert list(words(typed)) == offered


def test_the_shells_hand_over_what_was_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever it looks like: `megaverl report --<Tab>`."""
    for typed, offered in (
        (["report", "--"], ["--help", "--output", "--serve", "--host", "--port"]),
        (["train", "--he"], ["--help"]),
        (["da"], ["data"]),
    ):
        assert main(["completion", "--words", *typed]) == 0
        assert capsys.readouterr().out.split() == offered


def test_bash_takes_it(tmp_path: Path) -> None:
    (tmp_path / "megaverl").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m megaverl.cli.main "$@"\n'
    )
    (tmp_path / "megaverl").chmod(0o755)
    script = (
        "source <(megaverl completion bash)\n"
        "COMP_WORDS=(megaverl train actor.t); COMP_CWORD=2; _megaverl 2>/dev/null; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.stdout.split() == ["actor.tp="], done.stderr


def test_the_scripts_are_valid(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        text = capsys.readouterr().out
        if shutil.which(shell):
            subprocess.run([shell, "-n"], input=text, text=True, check=True)
    for wrong in (["tcsh"], []):
        with pytest.raises(SystemExit) as caught:
            main(["completion", *wrong])
        assert caught.value.code == 2


def test_descriptions_of_other_libraries_are_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Print a description's first paragraph, where the source breaks its lines in the middle of sentences."""
    for place in ("rollout.sampling", "rollout.vllm", "actor.megatron", "actor.ddp"):
        assert main(["keys", place]) == 0
        printed = capsys.readouterr().out
        for name, field in PLACES[place].settable().items():
            paragraph = " ".join(field.description.strip().partition("\n\n")[0].split())
            assert (
                not paragraph
                or f"{place}.{name}: " in printed
                and f"\n    {paragraph}" in printed
            ), name
