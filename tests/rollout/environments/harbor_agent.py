"""An agent of Harbor as its users write one: it asks the policy once. Runs under Harbor's own Python."""

import asyncio
import json
import urllib.request
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext


class Asker(BaseAgent):
    """Writes the policy's answer to answer.txt, and then runs `command`."""

    def __init__(self, *args: Any, command: str = "true", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._command = command

    @staticmethod
    def name() -> str:
        return "asker"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        pass

    def ask(self, text: str) -> str:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
        request = urllib.request.Request(
            f"{self.extra_env['OPENAI_BASE_URL']}/chat/completions",
            json.dumps(body).encode(),
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.load(response)["choices"][0]["message"]["content"]

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        text = await asyncio.to_thread(self.ask, instruction)
        if text == "leave":
            await environment.stop(delete=True)
        await environment.exec('cat > answer.txt <<< "$TEXT"', env={"TEXT": text})
        await environment.exec(self._command)
