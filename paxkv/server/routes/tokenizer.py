"""POST /tokenize and /detokenize: token ids of a text or of a conversation, and back."""

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paxkv.config.server_config import ServerConfig
from paxkv.errors import InvalidRequestError
from paxkv.server.engine_protocol import EngineClient, Tokenizer
from paxkv.server.protocol.chat.chat_prompt import check_template_allowed, render_chat
from paxkv.server.protocol.json_body import convert_fields, read_body
from paxkv.server.protocol.openai_protocol import check_generation_prompt, check_model
from paxkv.server.protocol.tool_choice import checked_tools, known_tools
from paxkv.server.protocol.unsupported_fields import TOKENIZE_FIELDS, refuse_unsupported
from paxkv.server.routes.json_response import json_response


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Either `prompt`, or `messages` through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, object]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, object] | None = None
    tools: list[dict[str, object]] | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`token_strs` are names in the vocabulary, such as "Ġthe"; null unless requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


class DetokenizeBody(msgspec.Struct, frozen=True):
    prompt: str


# Fields that have no meaning for a prompt.
_CHAT_FIELDS = ("chat_template", "chat_template_kwargs", "tools")


class TokenizerRoutes:
    """The routes of the model's tokenizer."""

    def __init__(self, engine: EngineClient, config: ServerConfig) -> None:
        self._engine = engine
        self._config = config

    def routes(self) -> list[Route]:
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or of a conversation."""
        body = await read_body(request, _read_tokenize, max_body_bytes=self._config.max_body_bytes)
        check_model(body.model, self._engine.model_info)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError(
                "send either prompt or messages, and not both.", param="prompt"
            )
        if body.messages is None:
            for name in _CHAT_FIELDS:
                if getattr(body, name):
                    raise InvalidRequestError(
                        f"{name} needs messages; leave it out, or send messages instead of prompt.",
                        param=name,
                    )
        check_template_allowed(body.chat_template, self._config)
        check_generation_prompt(
            continue_final_message=body.continue_final_message,
            add_generation_prompt=body.add_generation_prompt,
        )
        checked_tools(body.tools or [])
        # In a thread, because a body may contain millions of tokens.
        token_ids, names = await asyncio.to_thread(self._tokens, body)
        return json_response(
            TokenizeBody(
                count=len(token_ids),
                max_model_len=self._engine.model_info.max_model_len,
                tokens=token_ids,
                token_strs=names,
            )
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, including special tokens."""
        body = await read_body(
            request, self._read_detokenize, max_body_bytes=self._config.max_body_bytes
        )
        text = await asyncio.to_thread(
            self._tokenizer().decode, body.tokens, skip_special_tokens=False
        )
        return json_response(DetokenizeBody(prompt=text))

    def _read_detokenize(self, fields: dict[str, object]) -> DetokenizeRequest:
        body = convert_fields(fields, DetokenizeRequest)
        check_model(body.model, self._engine.model_info)
        vocab_size = self._engine.model_info.vocab_size
        bad = next((i for i, t in enumerate(body.tokens) if not 0 <= t < vocab_size), None)
        if bad is not None:
            raise InvalidRequestError(
                f"tokens[{bad}] is {body.tokens[bad]}; token ids are in [0, {vocab_size}).",
                param="tokens",
            )
        return body

    def _tokens(self, body: TokenizeRequest) -> tuple[list[int], list[str] | None]:
        token_ids = self._token_ids(body)
        return token_ids, self._names(token_ids) if body.return_token_strs else None

    def _token_ids(self, body: TokenizeRequest) -> list[int]:
        text, add_special_tokens = body.prompt, body.add_special_tokens is not False
        if body.messages is not None:
            text = render_chat(
                self._engine,
                body.messages,
                add_generation_prompt=body.add_generation_prompt is not False,
                template_kwargs=self._config.default_chat_template_kwargs.with_request(
                    body.chat_template_kwargs
                ),
                tools=known_tools(body.tools or ()) or None,
                continue_final_message=bool(body.continue_final_message),
                chat_template=body.chat_template,
            ).text
            # The template has already written the special tokens.
            add_special_tokens = bool(body.add_special_tokens)
        assert text is not None
        return self._tokenizer().encode(text, add_special_tokens=add_special_tokens)

    def _names(self, token_ids: list[int]) -> list[str]:
        tokenizer = self._tokenizer()
        return [tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def _tokenizer(self) -> Tokenizer:
        if self._engine.tokenizer is None:
            raise InvalidRequestError("this model was loaded without a tokenizer.")
        return self._engine.tokenizer


def _read_tokenize(fields: dict[str, object]) -> TokenizeRequest:
    refuse_unsupported(fields, TOKENIZE_FIELDS)
    return convert_fields(fields, TokenizeRequest)
