"""What is said of a rank that does not answer."""

from __future__ import annotations

from megaverl.distributed.failures import cause_of


def test_what_a_transport_says_is_told_in_short() -> None:
    raw = "[/a/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4498. This is typically y"
    assert cause_of(RuntimeError(raw)) == "Connection closed by peer [127.0.0.1]:4498"
    assert cause_of(RuntimeError()) == "no answer"
