"""GET /openapi.json: the API as an OpenAPI document, made from the structs of the bodies."""

import re

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import paxkv
from paxkv.server.protocol.anthropic.bodies import (
    AnthropicErrorBody,
    MessageBody,
    TokenCountBody,
)
from paxkv.server.protocol.anthropic.errors import OVERLOADED_STATUS
from paxkv.server.protocol.anthropic.request import CountTokensRequest, MessagesRequest
from paxkv.server.protocol.chat.chat_responses import ChatBody
from paxkv.server.protocol.error_response import ErrorBody
from paxkv.server.protocol.openai_protocol import ChatCompletionRequest, CompletionRequest
from paxkv.server.protocol.openai_responses import CompletionBody
from paxkv.server.protocol.responses.bodies import DeletedResponseBody, ResponseBody
from paxkv.server.protocol.responses.request import ResponsesRequest
from paxkv.server.routes.info import ModelCard, ModelList
from paxkv.server.routes.messages import MESSAGES_PATH
from paxkv.server.routes.route_path import is_below
from paxkv.server.routes.tokenizer import (
    DetokenizeBody,
    DetokenizeRequest,
    TokenizeBody,
    TokenizeRequest,
)

_REF_TEMPLATE = "#/components/schemas/{name}"
# Path -> the request's struct, the response's struct, and whether the response may be a stream.
_POSTS: dict[str, tuple[type[msgspec.Struct], type[msgspec.Struct], bool]] = {
    "/v1/completions": (CompletionRequest, CompletionBody, True),
    "/v1/chat/completions": (ChatCompletionRequest, ChatBody, True),
    "/v1/responses": (ResponsesRequest, ResponseBody, True),
    MESSAGES_PATH: (MessagesRequest, MessageBody, True),
    f"{MESSAGES_PATH}/count_tokens": (CountTokensRequest, TokenCountBody, False),
    "/tokenize": (TokenizeRequest, TokenizeBody, False),
    "/detokenize": (DetokenizeRequest, DetokenizeBody, False),
}
_GETS: dict[str, type[msgspec.Struct] | None] = {
    "/v1/responses/{response_id}": ResponseBody,
    "/v1/models": ModelList,
    "/v1/models/{model}": ModelCard,
    "/health": None,
    "/metrics": None,
}
_DELETES: dict[str, type[msgspec.Struct]] = {
    "/v1/responses/{response_id}": DeletedResponseBody,
}
_ERRORS = {
    "400": "a field is not valid or not supported",
    "404": "there is no such model, or no such response",
    "413": "the body is too long",
    "415": "the body is not JSON",
    "503": "the engine has ended, or too many requests wait for it",
}
_ANTHROPIC_ERRORS = _ERRORS | {
    "503": "the engine has ended",
    str(OVERLOADED_STATUS): "too many requests wait for the engine",
}


class OpenApiRoutes:
    """The route of the document."""

    def __init__(self) -> None:
        self._document = msgspec.json.encode(openapi_document())

    def routes(self) -> list[Route]:
        return [Route("/openapi.json", self.document)]

    async def document(self, _request: Request) -> Response:
        return Response(self._document, media_type="application/json")


def openapi_document() -> dict[str, object]:
    """The document as JSON values."""
    structs = [s for reads, answers, _ in _POSTS.values() for s in (reads, answers)]
    structs += [s for s in (*_GETS.values(), *_DELETES.values()) if s is not None]
    structs += [ErrorBody, AnthropicErrorBody]
    refs, components = msgspec.json.schema_components(
        structs, schema_hook=_any_schema, ref_template=_REF_TEMPLATE
    )
    by_struct = dict(zip(structs, refs, strict=True))
    errors = {status: _answer(text, by_struct[ErrorBody]) for status, text in _ERRORS.items()}
    anthropic_errors = {
        status: _answer(text, by_struct[AnthropicErrorBody])
        for status, text in _ANTHROPIC_ERRORS.items()
    }
    paths: dict[str, object] = {}
    for path, (reads, answers, may_stream) in _POSTS.items():
        done = _answer("done", by_struct[answers])
        if may_stream:
            done["content"]["text/event-stream"] = {"schema": {"type": "string"}}
        body = {"required": True, "content": {"application/json": {"schema": by_struct[reads]}}}
        responses = {"200": done} | (anthropic_errors if is_below(path, MESSAGES_PATH) else errors)
        paths[path] = {"post": {"requestBody": body, "responses": responses}}
    without_body = [("get", *item) for item in _GETS.items()]
    without_body += [("delete", *item) for item in _DELETES.items()]
    for method, path, struct in without_body:
        operation: dict[str, object] = {
            "responses": {
                "200": {"description": "done"}
                if struct is None
                else _answer("done", by_struct[struct]),
                "404": errors["404"],
                "503": errors["503"],
            }
        }
        for name in re.findall(r"{(\w+)}", path):
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "paxkv", "version": paxkv.__version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _any_schema(_type: type) -> dict[str, object]:
    """The schema of `object`, the type of fields with more forms than a struct can express."""
    return {"description": "any JSON value"}


def _answer(description: str, schema: dict[str, object]) -> dict[str, dict[str, object]]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
