"""A resources server of NeMo Gym as its users write one, and a head server beside it. Runs under Gym's own Python."""

from fastapi import FastAPI
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseRunRequest,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import HeadServer


class LettersRequest(BaseRunRequest):
    word: str


class LettersVerifyRequest(LettersRequest, BaseVerifyRequest):
    pass


class Letters(SimpleResourcesServer):
    """A tool that spells, and the number of letters of the answer as the reward: any model earns something else."""

    config: BaseResourcesServerConfig

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/spell")(self.spell)
        return app

    async def spell(self, body: dict[str, str]) -> str:
        return " ".join(body["word"])

    async def verify(self, body: LettersVerifyRequest) -> BaseVerifyResponse:
        if body.word == "fail":
            raise KeyError("forgotten")
        texts = [
            part.text
            for item in body.response.output
            if item.type == "message"
            for part in item.content
        ]
        return BaseVerifyResponse(**body.model_dump(), reward=len("".join(texts)) / 10)


if __name__ == "__main__":
    Letters.run_webserver()
else:
    HeadServer.run_webserver()
    # The file starts Letters.run_webserver() when it is run by itself.
