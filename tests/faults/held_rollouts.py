"""`megaverl ARGUMENTS`, where the engines keep back the last groups of a step until the reference has scored the first:
run by test_split_runs.py. Who waits for a whole batch would wait for good."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from megaverl.cli.main import main
from megaverl.data.batch import RolloutBatch
from megaverl.dataflow.streaming import StreamingCarrier
from megaverl.distributed.worlds import receive_json, send_json
from megaverl.trainer.step import RLStep

FIRST_KEPT = 4  # samples from here on
ENGINES, REFERENCE = (0, 1), 2
generate, give, score_share = RLStep.generate, StreamingCarrier.give, RLStep.score_share
kept: list[tuple[Sequence[int], RolloutBatch]] = []


def give_or_keep(carrier: StreamingCarrier, rows: Sequence[int], part: RolloutBatch) -> None:
    if rows[0] < FIRST_KEPT:
        give(carrier, rows, part)
    else:
        kept.append((rows, part))


def generate_and_wait(own: RLStep, *given: Any, **named: Any) -> RolloutBatch:
    batch = generate(own, *given, **named)
    carrier = own.outlet
    assert carrier is not None
    receive_json(carrier.fabric, "scored", REFERENCE)
    while kept:
        give(carrier, *kept.pop(0))
    return batch


def score_and_say(step: RLStep, operator: str, rows: range, share: RolloutBatch, number: int) -> None:
    score_share(step, operator, rows, share, number)
    carrier = step.outlet
    assert carrier is not None
    if operator == "ref_log_probs" and rows.start == 0 and carrier.rank == REFERENCE:
        for engine in ENGINES:
            send_json(carrier.fabric, "scored", engine, number).wait()


if __name__ == "__main__":
    setattr(StreamingCarrier, "give", give_or_keep)  # noqa: B010
    setattr(RLStep, "generate", generate_and_wait)  # noqa: B010
    setattr(RLStep, "score_share", score_and_say)  # noqa: B010
    sys.exit(main(sys.argv[1:]))
