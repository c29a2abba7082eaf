"""What libraries print without need is left out, and nothing else."""

from __future__ import annotations

import inspect
import logging
import os
import re
import warnings

import pytest
import torch
import torch.distributed as dist

from megaverl.platform.quiet import leave_out_expected_warnings, native_stderr_without


def test_expected_warnings_are_left_out() -> None:
    leaf = torch.ones(2, requires_grad=True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        leave_out_expected_warnings()
        assert leaf[:1].grad is None
        warnings.warn("another", stacklevel=1)
    assert [str(each.message) for each in seen] == ["another"]
    assert not logging.getLogger("torch._library.triton").isEnabledFor(logging.WARNING)


def test_barriers_on_the_current_device_are_expected() -> None:
    """The text stands in torch's source, and only a group of NCCL's warns."""
    source = inspect.getsource(dist.barrier)
    text = re.search(r'warnings.warn\(.*?"(.+?)"', source, re.DOTALL)
    assert text is not None
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        leave_out_expected_warnings()
        warnings.warn(text[1], stacklevel=1)
    assert seen == []


def test_only_lines_with_the_text_are_left_out(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with native_stderr_without("NUMA binding"):
        os.write(2, b"Warning: NUMA binding: MEMBIND\nanother line\n")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "another line\nafter\n"
