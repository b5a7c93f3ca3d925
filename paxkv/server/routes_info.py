"""What the server says about itself: models, health, metrics, version; and its tokenizer."""

import asyncio

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import paxkv
from paxkv.contracts.engine_output import SchedulerStats
from paxkv.errors import EngineDeadError, InvalidRequestError
from paxkv.server.admission import Admission
from paxkv.server.chat_prompt import render_chat
from paxkv.server.engine_protocol import EngineClient, Tokenizer
from paxkv.server.json_body import convert_fields, read_json_object
from paxkv.server.metrics import ServerMetrics
from paxkv.server.openai_protocol import check_model
from paxkv.server.unsupported_fields import TOKENIZE_FIELDS, refuse_unsupported

# A scrape shows what the engine said last when it is too busy to answer.
_STATS_TIMEOUT_S = 1.0


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "paxkv"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Either `prompt`, or `messages` through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, object]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = True
    chat_template_kwargs: dict[str, object] | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


class DetokenizeBody(msgspec.Struct, frozen=True):
    prompt: str


class InfoRoutes:
    """The routes that generate nothing."""

    def __init__(
        self,
        engine: EngineClient,
        metrics: ServerMetrics,
        admission: Admission,
        *,
        max_body_bytes: int,
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.list_models),
            # A model's name may hold slashes.
            Route("/v1/models/{model:path}", self.get_model),
            Route("/health", self.health),
            # Load balancers of some clouds ask here, with either method.
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/load", self.load),
            Route("/metrics", self.metrics),
            Route("/version", self.version),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def list_models(self, _request: Request) -> Response:
        return _json(ModelList(data=[self._model_card()]))

    async def get_model(self, request: Request) -> Response:
        check_model(request.path_params["model"], self._engine.model_info.served_model_name)
        return _json(self._model_card())

    async def health(self, _request: Request) -> Response:
        """200 while the engine lives."""
        if not self._engine.is_alive:
            raise EngineDeadError("the engine has ended, or another is not ready yet.")
        return Response()

    async def load(self, _request: Request) -> Response:
        """Calls of clients that are being answered by the engine, running and waiting."""
        return _json({"server_load": self._admission.num_calls})

    async def metrics(self, _request: Request) -> Response:
        stats = await self._stats()
        return Response(self._metrics.render(stats), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def version(self, _request: Request) -> Response:
        return _json({"version": paxkv.__version__})

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or of a conversation."""
        fields = await read_json_object(request, max_body_bytes=self._max_body_bytes)
        refuse_unsupported(fields, TOKENIZE_FIELDS)
        body = convert_fields(fields, TokenizeRequest)
        check_model(body.model, self._engine.model_info.served_model_name)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError(
                "send either prompt or messages, and not both.", param="prompt"
            )
        token_ids = await asyncio.to_thread(self._token_ids, body)
        return _json(
            TokenizeBody(
                count=len(token_ids),
                max_model_len=self._engine.model_info.max_model_len,
                tokens=token_ids,
            )
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        fields = await read_json_object(request, max_body_bytes=self._max_body_bytes)
        body = convert_fields(fields, DetokenizeRequest)
        check_model(body.model, self._engine.model_info.served_model_name)
        vocab_size = self._engine.model_info.vocab_size
        bad = next((i for i, t in enumerate(body.tokens) if not 0 <= t < vocab_size), None)
        if bad is not None:
            raise InvalidRequestError(
                f"tokens[{bad}] is {body.tokens[bad]}; token ids are in [0, {vocab_size}).",
                param="tokens",
            )
        text = await asyncio.to_thread(
            self._tokenizer().decode, body.tokens, skip_special_tokens=False
        )
        return _json(DetokenizeBody(prompt=text))

    def _token_ids(self, body: TokenizeRequest) -> list[int]:
        text, add_special_tokens = body.prompt, body.add_special_tokens is not False
        if body.messages is not None:
            text = render_chat(
                self._engine,
                body.messages,
                add_generation_prompt=body.add_generation_prompt is not False,
                template_kwargs=body.chat_template_kwargs,
            )
            # The template has written them.
            add_special_tokens = bool(body.add_special_tokens)
        assert text is not None
        return self._tokenizer().encode(text, add_special_tokens=add_special_tokens)

    def _tokenizer(self) -> Tokenizer:
        if self._engine.tokenizer is None:
            raise InvalidRequestError("this model was loaded without a tokenizer.")
        return self._engine.tokenizer

    async def _stats(self) -> SchedulerStats:
        if not self._engine.is_alive:
            return self._engine.latest_stats
        try:
            return await asyncio.wait_for(self._engine.get_stats(), _STATS_TIMEOUT_S)
        except (TimeoutError, EngineDeadError):
            return self._engine.latest_stats

    def _model_card(self) -> ModelCard:
        info = self._engine.model_info
        return ModelCard(
            id=info.served_model_name,
            created=info.created,
            root=info.model,
            max_model_len=info.max_model_len,
        )


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
