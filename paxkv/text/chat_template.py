"""`ChatTemplate`: renders a conversation into a prompt with the checkpoint's jinja template."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import jinja2
import jinja2.ext
import jinja2.nodes

from paxkv.errors import (
    ChatTemplateError,
    ConfigError,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from paxkv.text.bounded_template import BoundedEnvironment, check_numbers
from paxkv.text.call_arguments import dump_json, template_arguments
from paxkv.text.short_call_ids import needs_short_ids, with_short_ids
from paxkv.text.text_parts import TextParts
from paxkv.text.tokenizer import read_json_object

Message = Mapping[str, object]
# Whether a template expects contents as strings or as lists of parts; auto inspects the template.
ContentFormat = Literal["auto", "string", "openai"]

# UTF-8; a byte order mark is not part of the template.
_ENCODING = "utf-8-sig"
# Variables that `render` sets.
_RENDER_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """One model's chat template.

    Args:
        source: The jinja template, or several by name: "tool_use" serves requests with tools,
            "default" all others.
        special_tokens: Variables for the template, such as `{"bos_token": "<s>"}`.
        content_format: "openai" passes contents as lists of `{"type": "text", "text": ...}`,
            "string" as strings. "auto" passes lists if the template has a loop over contents. If
            the template also tests whether values are strings, a result of a tool that came as a
            string stays one, and one that came in parts becomes `TextParts`.
        origins: Template name -> the place where it was found. A template without an origin came
            with a request, so its errors are errors of the request.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] | None = None,
        content_format: ContentFormat = "auto",
        origins: Mapping[str, str] | None = None,
    ) -> None:
        self._sources = {"default": source} if isinstance(source, str) else dict(source)
        self._special_tokens = dict(special_tokens or {})
        self._content_format = content_format
        self._origins = dict(origins or {})
        self._environment = _make_environment()
        # Compiled on first use: a checkpoint with a broken template can still complete prompts.
        self._compiled: dict[str, jinja2.Template] = {}
        self._expects_parts: dict[str, bool] = {}
        self._accepts_text: dict[str, bool] = {}

    @property
    def source(self) -> str | None:
        """The jinja template of requests without tools."""
        return self._sources.get("default")

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        *,
        special_tokens: Mapping[str, str] | None = None,
        content_format: ContentFormat = "auto",
    ) -> "ChatTemplate | None":
        """Reads the template from a checkpoint's folder; None if there is none.

        The first of chat_template.jinja, chat_template.json (older vision checkpoints) and
        tokenizer_config.json that contains a template is used. Files in additional_chat_templates,
        such as tool_use.jinja, are further templates.

        Raises:
            ConfigError: A file cannot be read, or does not contain a template.
        """
        options = {"special_tokens": special_tokens, "content_format": content_format}
        paths = {p.stem: p for p in sorted(folder.glob("additional_chat_templates/*.jinja"))}
        path = folder / "chat_template.jinja"
        if path.is_file():
            paths.setdefault("default", path)
        if paths:
            sources = {name: _read_template(path) for name, path in paths.items()}
            origins = {name: str(path.relative_to(folder)) for name, path in paths.items()}
            return cls(sources, origins=origins, **options)
        for path in (folder / "chat_template.json", folder / "tokenizer_config.json"):
            if sources := _as_sources(path, read_json_object(path).get("chat_template")):
                origins = {name: f"chat_template {name!r} of {path.name}" for name in sources}
                return cls(sources, origins=origins, **options)
        return None

    @classmethod
    def from_setting(
        cls,
        setting: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        content_format: ContentFormat = "auto",
    ) -> "ChatTemplate":
        """The template of `--chat-template`: a file, or the template itself in a single line.

        Raises:
            ConfigError: It is neither, or cannot be compiled.
        """
        # File names rarely contain these braces; every useful template contains them.
        if "{{" in setting or "{%" in setting:
            source = setting.replace("\\n", "\n")
        else:
            try:
                source = Path(setting).read_text(encoding=_ENCODING)
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"chat_template={setting!r} is neither a readable file nor a jinja template: "
                    f"{error}."
                ) from error
        template = cls(source, special_tokens=special_tokens, content_format=content_format)
        try:
            template._compile("default")
        except InvalidRequestError as error:
            raise ConfigError(f"chat_template={setting!r}: {error}") from error
        return template

    def find_errors(self) -> list[str]:
        """One sentence per template that cannot be compiled, with its name."""
        errors = []
        for name in self._sources:
            try:
                self._compile(name)
            except (ChatTemplateError, InvalidRequestError) as error:
                errors.append(str(error))
        return errors

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """Renders a conversation; encode the result without adding special tokens.

        Args:
            messages: `{"role": ..., "content": ...}`. The content is text, or a list of text parts
                `{"type": "text", "text": ...}`, which are joined by line breaks. The content of an
                assistant may be None; the template receives an empty text or no parts. Arguments
                of tool calls may be JSON text; the template receives an object or a `CallText`.
            add_generation_prompt: End the prompt with the opening of the assistant's turn.
            tools: Functions that the model may call, as JSON objects in OpenAI's format.
            documents: Documents for the answer, for templates that support them.
            template_kwargs: Further variables of this model's template, such as `enable_thinking`.

        Raises:
            ChatTemplateError: The model's template cannot be compiled.
            InvalidRequestError: The messages are malformed, the template rejects them, or
                `template_kwargs` sets a variable that is an argument of this method.
        """
        template_kwargs = template_kwargs or {}
        reserved = sorted(_RENDER_VARIABLES & template_kwargs.keys())
        if reserved:
            raise InvalidRequestError(
                f"chat_template_kwargs must not set {', '.join(reserved)}. Use the request's own "
                "fields.",
                param="chat_template_kwargs",
            )
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        template = self._compile(name)
        checked = check_messages(messages)
        if needs_short_ids(self._sources[name]):
            checked = [with_short_ids(message) for message in checked]
        if self._expects_parts[name]:
            checked = [
                # Such templates may write the result of a tool without a loop.
                _with_text_parts(*both)
                if self._accepts_text[name] and both[0]["role"] == "tool"
                else _with_parts(*both)
                for both in zip(checked, messages, strict=True)
            ]
        variables = {
            **self._special_tokens,
            **template_kwargs,
            "messages": checked,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._environment.render(template, variables)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        # A template is a program from the checkpoint, so it may raise any exception.
        except Exception as error:
            raise InvalidRequestError(
                f"the chat template fails on these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error

    def _compile(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            if name not in self._sources:
                raise InvalidRequestError(
                    f"the model's chat templates are {sorted(self._sources)}; there is no {name!r}."
                )
            source = self._sources[name]
            try:
                is_auto = self._content_format == "auto"
                tree = self._environment.parse(source)
                self._expects_parts[name] = (
                    _loops_over_contents(tree) if is_auto else self._content_format == "openai"
                )
                self._accepts_text[name] = is_auto and _tests_for_text(tree)
                self._compiled[name] = self._environment.from_string(source)
            # Python raises the other three errors if the template is nested too deeply.
            except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
                raise self._compile_error(name, error) from error
        return self._compiled[name]

    def _compile_error(
        self, name: str, error: Exception
    ) -> ChatTemplateError | InvalidRequestError:
        origin = self._origins.get(name)
        # Some of jinja's messages end with a full stop.
        reason = str(error).removesuffix(".")
        if origin is None:
            return InvalidRequestError(
                f"the chat template cannot be compiled: {reason}", param="chat_template"
            )
        line = getattr(error, "lineno", None)
        where = "" if line is None else f", line {line}"
        return ChatTemplateError(
            f"the model's chat template ({origin}{where}) cannot be compiled: {reason}. Repair the "
            "file, or start the server with --chat-template; /v1/completions needs no template."
        )


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding=_ENCODING)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Download it again.") from error


def _as_sources(path: Path, value: object) -> dict[str, str]:
    """Templates by name, from one of the three formats in the error message; {} if empty."""
    if not value:
        return {}
    entries = value
    if not isinstance(value, list):
        named = value if isinstance(value, Mapping) else {"default": value}
        entries = [{"name": name, "template": source} for name, source in named.items()]
    sources = {}
    for entry in entries:
        fields = entry if isinstance(entry, Mapping) else {}
        name, source = fields.get("name"), fields.get("template")
        if not isinstance(name, str) or not isinstance(source, str):
            raise ConfigError(
                f"chat_template of {path} is {value!r:.100}; expected a template, a table of "
                'them, {"default": "..."}, or a list of {"name": "default", "template": "..."}.'
            )
        sources[name] = source
    return sources


def check_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Converts contents to text and arguments of tool calls to objects.

    Raises:
        InvalidRequestError: There are no messages, or one has no role or no usable content.
        UnsupportedFeatureError: A part of a content is not text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequestError(
            f"messages must be a non-empty list of messages, got {messages!r}.", param="messages"
        )
    checked = []
    for idx, message in enumerate(messages):
        where = f"messages[{idx}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(
                f"{where} must be an object with a role, got {message!r}.", param="messages"
            )
        content = message.get("content")
        if content is None and message["role"] == "assistant":
            content = ""
        text = {"content": _content_text(where, content)}
        checked.append({**message, **text, **_with_arguments(message.get("tool_calls"))})
    return checked


def _with_arguments(tool_calls: object) -> dict[str, object]:
    """The converted field `tool_calls`; {} if it is not a list, so that it stays unchanged."""
    if not isinstance(tool_calls, list):
        return {}
    calls = []
    for call in tool_calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            arguments = template_arguments(function.get("arguments"))
            call = {**call, "function": {**function, "arguments": arguments}}
        calls.append(call)
    return {"tool_calls": calls}


def _content_text(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequestError(
            f"{where}.content must be text or a list of parts, got {content!r}.", param="messages"
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise UnsupportedFeatureError(
                f"{where}.content has a part of type {kind!r}; only 'text' is supported.",
                param="messages",
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f"{where}.content has a text part without text.", param="messages"
            )
        texts.append(part["text"])
    return "\n".join(texts)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; only its body is rendered.

    Variables that the body sets are not visible after it, as in transformers.
    """

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


def _loops_over_contents(tree: jinja2.nodes.Template) -> bool:
    """Whether a template has a loop over the content of a message, so it expects parts."""
    names = {
        node.target.name
        for node in tree.find_all(jinja2.nodes.Assign)
        if isinstance(node.target, jinja2.nodes.Name) and _is_content(node.node)
    }
    for loop in tree.find_all(jinja2.nodes.For):
        items = loop.iter
        while isinstance(items, jinja2.nodes.Filter) and items.node is not None:
            items = items.node
        if _is_content(items) or (isinstance(items, jinja2.nodes.Name) and items.name in names):
            return True
    return False


def _tests_for_text(tree: jinja2.nodes.Template) -> bool:
    """Whether a template tests if something is a string, so it expects texts and parts."""
    return any(test.name == "string" for test in tree.find_all(jinja2.nodes.Test))


def _is_content(node: jinja2.nodes.Node) -> bool:
    """Whether a node is message.content or message['content']."""
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    return (
        isinstance(node, jinja2.nodes.Getitem)
        and isinstance(node.arg, jinja2.nodes.Const)
        and node.arg.value == "content"
    )


def _with_parts(checked: dict[str, object], message: Message) -> dict[str, object]:
    """A message with its original parts as content, or with its text as the only part."""
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**checked, "content": parts or []}


def _with_text_parts(checked: dict[str, object], message: Message) -> dict[str, object]:
    """A message with its text as content, or with `TextParts` if it came in parts."""
    content = message["content"]
    if isinstance(content, str):
        return checked
    return {**checked, "content": TextParts(content, str(checked["content"]))}


def _make_environment() -> BoundedEnvironment:
    """An environment for Hugging Face templates, set up as in transformers."""
    environment = BoundedEnvironment(extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`. Unlike jinja's own filter, it does not escape HTML characters."""
    check_numbers((indent,))
    return dump_json(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
