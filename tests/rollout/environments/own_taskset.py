"""A taskset of verifiers as its users write one: two turns, a reward and a harness of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import verifiers.v1 as vf

__all__ = ["TwoTurns", "Words"]


class WordData(vf.TaskData):
    answer: str = ""


class WordTask(vf.Task[WordData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def written(self, trace: vf.Trace) -> float:
        """The number of letters in the last answer: any model earns something else in every episode."""
        return float(len(trace.last_reply or ""))

    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        if self.data.answer == "fail":
            raise KeyError("forgotten")
        return 1.0


class WordsConfig(vf.TasksetConfig):
    first: str = "say"


class Words(vf.Taskset[WordTask, WordsConfig]):
    INFINITE = True

    def load(self) -> Iterator[WordTask]:
        for number in range(10**6):
            data = WordData(
                prompt=f"{self.config.first} {number}",
                answer="fail" if number == 2 else str(number),
            )
            yield WordTask(data, self.config.task)


class TwoTurns(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
    ) -> vf.ProgramResult:
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(
            base_url=endpoint, headers={"authorization": f"Bearer {secret}"}
        ) as client:
            for more in ("and then", ""):
                body = {"model": ctx.model, "messages": messages}
                reply = await client.post("chat/completions", json=body, timeout=60)
                reply.raise_for_status()
                messages += [
                    reply.json()["choices"][0]["message"],
                    {"role": "user", "content": more},
                ]
        return vf.ProgramResult(exit_code=0, stdout=json.dumps(messages), stderr="")
