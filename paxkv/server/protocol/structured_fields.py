"""Converts `response_format` and `structured_outputs` of a body to StructuredOutputsParams."""

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from paxkv.config.sampling_params import BeamSearchParams, SamplingParams
from paxkv.config.structured_outputs_config import StructuredOutputsConfig
from paxkv.config.structured_outputs_params import (
    STRICT_KEYWORD,
    FormField,
    StructuredOutputsParams,
)
from paxkv.errors import InvalidRequestError, UnsupportedFeatureError
from paxkv.server.protocol.field_names import CHAT_NAMES, FieldNames

_ParamsT = TypeVar("_ParamsT", bound=SamplingParams | BeamSearchParams)

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# Options for one of the kinds, or for a response_format.
_OPTIONS = ("disable_any_whitespace", "whitespace_pattern", "disable_additional_properties")
_KNOWN_FIELDS = (*_KINDS, *_OPTIONS)
# Choices of vLLM's backends. paxkv has only one backend, without a fallback.
_IGNORED_FIELDS = ("disable_fallback", "backend")
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def with_server_settings(params: _ParamsT, config: StructuredOutputsConfig) -> _ParamsT:
    """Applies the server's settings for structured output to sampling parameters."""
    if isinstance(params, BeamSearchParams) or params.structured_outputs is None:
        return params
    return dataclasses.replace(params, structured_outputs=config.apply(params.structured_outputs))


def structured_outputs_params(
    response_format: object, structured_outputs: object, names: FieldNames = CHAT_NAMES
) -> StructuredOutputsParams | None:
    """Combines the two fields of a body; None if they do not ask for structured output.

    Args:
        names: Has the client's name for `response_format`.

    Raises:
        InvalidRequestError: A field is malformed, or both fields ask for structured output.
        UnsupportedFeatureError: `structured_outputs` has an unknown field.
    """
    by_format = _from_response_format(response_format, names)
    if structured_outputs is None:
        return by_format
    given = _given_fields(structured_outputs)
    if by_format is None:
        return StructuredOutputsParams(**given)
    if any(name in _KINDS for name in given):
        raise InvalidRequestError(
            f"{names.form} and structured_outputs both ask for a form; leave one of them out.",
            param="structured_outputs",
        )
    return dataclasses.replace(by_format, **given)


def _given_fields(fields: object) -> dict[str, object]:
    if not isinstance(fields, Mapping):
        raise InvalidRequestError(
            "structured_outputs must be an object.", param="structured_outputs"
        )
    unknown = sorted(
        key
        for key, value in fields.items()
        if value is not None and key not in (*_KNOWN_FIELDS, *_IGNORED_FIELDS)
    )
    if unknown:
        raise UnsupportedFeatureError(
            f"structured_outputs has {', '.join(unknown)}; it may have {', '.join(_KNOWN_FIELDS)}.",
            param="structured_outputs",
        )
    given = {k: v for k, v in fields.items() if v is not None and k in _KNOWN_FIELDS}
    for name in ("json", "structural_tag"):
        if isinstance(given.get(name), Mapping):
            given[name] = msgspec.json.encode(given[name]).decode()
    return given


def _from_response_format(
    response_format: object, names: FieldNames
) -> StructuredOutputsParams | None:
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind not in _FORMATS:
        raise InvalidRequestError(
            f"{names.form}.type must be one of {', '.join(_FORMATS)}.", param=names.form
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True, sent_in=(FormField(name=names.form),))
    if kind == "structural_tag":
        tag = msgspec.json.encode(response_format).decode()
        return StructuredOutputsParams(structural_tag=tag, sent_in=(FormField(name=names.form),))
    named = response_format.get("json_schema")
    # OpenAI's SDKs write the schema under "schema".
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, (Mapping, bool)):
        raise InvalidRequestError(
            'response_format.json_schema must be {"name": "...", "schema": {...}}.',
            param="response_format",
        )
    schema = with_strictness(names.form_strict, schema, named.get("strict"))
    return StructuredOutputsParams(
        json=msgspec.json.encode(schema).decode(),
        sent_in=(FormField(name=names.form_schema),),
    )


def with_strictness(
    path: str, schema: Mapping[str, object] | bool, strict: object
) -> Mapping[str, object] | bool:
    """Marks a strict schema, which is then rejected if the grammar would ignore a keyword.

    Args:
        path: Path of the field `strict`, for errors.

    Raises:
        InvalidRequestError: `strict` is neither a boolean nor null.
    """
    if not isinstance(strict, bool) and strict is not None:
        raise InvalidRequestError(
            f"{path} must be true, false or null, got {strict!r:.80}.", param=path
        )
    if not strict or isinstance(schema, bool):
        return schema
    return {**schema, STRICT_KEYWORD: True}
