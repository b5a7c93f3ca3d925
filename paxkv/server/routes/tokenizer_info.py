"""GET /tokenizer_info: the tokenizer's configuration, for clients that tokenize prompts themselves.

lm-eval's `tokenizer_backend=remote` reads the special tokens and the chat template from it.
"""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paxkv.errors import InvalidRequestError
from paxkv.server.engine_protocol import EngineClient
from paxkv.server.routes.json_response import json_response

# Paths on the machine that wrote the checkpoint.
_FILE_FIELDS = ("vocab_file", "merges_file")
_DEFAULT_CLASS = "PreTrainedTokenizerFast"


class TokenizerInfoRoutes:
    """The route of the tokenizer's configuration."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def routes(self) -> list[Route]:
        return [Route("/tokenizer_info", self.info, methods=["GET"])]

    async def info(self, _request: Request) -> Response:
        """tokenizer_config.json, with tokens as text and with the chat template that is in use."""
        tokenizer, chat_template = self._engine.tokenizer, self._engine.chat_template
        if tokenizer is None:
            raise InvalidRequestError("this model was loaded without a tokenizer.")
        config = {n: v for n, v in tokenizer.config.items() if n not in _FILE_FIELDS}
        fields = {"tokenizer_class": _DEFAULT_CLASS, **_with_plain_tokens(config)}
        source = None if chat_template is None else chat_template.source
        if source is not None:
            fields["chat_template"] = source
        return json_response(fields)


def _with_plain_tokens(value: object) -> object:
    """The value, with every `{"content": "</s>", "lstrip": false, ...}` replaced by "</s>"."""
    if isinstance(value, Mapping):
        if isinstance(value.get("content"), str):
            return value["content"]
        return {name: _with_plain_tokens(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_plain_tokens(item) for item in value]
    return value
