"""Chat templates render as in transformers, inside a sandbox; errors are the caller's."""

import json
from pathlib import Path

import pytest

from paxkv.errors import (
    ChatTemplateError,
    ConfigError,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from paxkv.text.chat_template import ChatTemplate

CHATML = (
    "{% for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}\n"
    "{% endfor %}\n"
    "  {% if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "  {%- endif %}"
)
MESSAGES = [{"role": "user", "content": "Hi"}]


def test_conversation_is_rendered_without_extra_white_space() -> None:
    template = ChatTemplate(CHATML)
    assert template.render(MESSAGES) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert (
        template.render(MESSAGES, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"
    )


def test_special_tokens_and_template_kwargs_are_variables() -> None:
    template = ChatTemplate("{{ bos_token }}{{ mood }}", special_tokens={"bos_token": "<s>"})
    assert template.render(MESSAGES, template_kwargs={"mood": "calm"}) == "<s>calm"


def test_content_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    template = ChatTemplate("{{ messages[0]['content'] }}")
    assert template.render([{"role": "user", "content": parts}]) == "a\nb"


def test_a_result_of_a_tool_stays_text_if_the_template_accepts_text() -> None:
    write = (
        "{% if c is string %}{{ c }}{% else %}{% for p in c %}<{{ p.text }}>{% endfor %}{% endif %}"
    )
    loop = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ m.content }}{% else %}"
        "{% set c = m.content %}" + write + "{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]
    assert ChatTemplate(loop).render(messages) == "<a>b"
    assert ChatTemplate(loop, content_format="openai").render(messages).startswith("<a>[{")
    only_parts = (
        "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
    )
    assert ChatTemplate(only_parts).render(messages) == "<a><b>"


@pytest.mark.parametrize(
    ("write", "wanted"),
    [
        # As in transformers, which passes the parts.
        ("{% for p in c %}<{{ p.text }}>{% endfor %}", "<a><b>"),
        ("{{ c[1].text }}{{ c | length }}", "b2"),
        # transformers would write Python's text of a list, or fail.
        ("{{ c }}", "a\nb"),
        ("{{ '(' + c + ')' }}", "(a\nb)"),
        ("{{ '(' ~ c ~ ')' }}", "(a\nb)"),
        ("{{ c.split('\n')[1] }}{{ c | trim }}", "ba\nb"),
    ],
)
def test_parts_of_a_result_are_parts_in_a_loop_and_otherwise_text(write: str, wanted: str) -> None:
    others = "{% for p in m.content %}{{ p.text }}{% endfor %}"
    source = (
        "{% for m in messages %}{% set c = m.content %}{% if m.role == 'tool' and c is string %}"
        "{{ c }}{% elif m.role == 'tool' %}" + write + "{% else %}" + others + "{% endif %}"
        "{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatTemplate(source).render([{"role": "tool", "content": parts}]) == wanted
    assert ChatTemplate(source).render([{"role": "tool", "content": "a"}]) == "a"


def test_error_names_a_part_that_is_not_text() -> None:
    content = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(UnsupportedFeatureError, match="image_url") as caught:
        ChatTemplate(CHATML).render([{"role": "user", "content": content}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "Hi",
        None,
        [{"content": "no role"}],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        ["x"],
    ],
)
def test_malformed_messages_are_rejected(messages: object) -> None:
    with pytest.raises(InvalidRequestError):
        ChatTemplate("any messages will do").render(messages)


def test_content_of_an_assistant_may_be_none() -> None:
    source = "{{ messages[0]['content'] == '' }}{{ messages[0]['content'] == [] }}"
    for message in ({"role": "assistant"}, {"role": "assistant", "content": None}):
        assert ChatTemplate(source).render([message]) == "TrueFalse"
        assert ChatTemplate(source, content_format="openai").render([message]) == "FalseTrue"


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt"])
def test_template_kwargs_must_not_set_reserved_variables(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        ChatTemplate(CHATML).render(MESSAGES, template_kwargs={name: 1})
    assert caught.value.param == "chat_template_kwargs"


def test_raise_exception_becomes_an_invalid_request_error() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        template.render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0]['content'] + 1 }}",
        "{% for",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
    ids=["escape", "mutation", "type_error", "syntax", "endless_recursion"],
)
def test_any_error_of_a_template_becomes_an_invalid_request_error(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        ChatTemplate(source).render(MESSAGES)


def test_tojson_keeps_html_characters_and_unicode() -> None:
    template = ChatTemplate("{{ tools | tojson }}")
    assert template.render(MESSAGES, tools=[{"name": "<é>"}]) == '[{"name": "<é>"}]'
    with pytest.raises(InvalidRequestError, match="a number over"):
        ChatTemplate("{{ tools | tojson(indent=2000000) }}").render(MESSAGES, tools=[{}])


def test_extensions_of_hugging_face_templates_work() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}"
        "{% endfor %}{{ strftime_now('%Y')|length }}"
    )
    assert template.render([*MESSAGES, *MESSAGES]) == "Hi4"


def test_variables_of_a_generation_block_are_local() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert ChatTemplate(source).render(MESSAGES) == "21"


def test_folder_without_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert ChatTemplate.from_folder(tmp_path) is None


def test_template_files_take_precedence_over_tokenizer_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
    assert ChatTemplate.from_folder(tmp_path).render(MESSAGES) == "config"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert ChatTemplate.from_folder(tmp_path).render(MESSAGES) == "processor"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.from_folder(tmp_path).render(MESSAGES) == "file"


def test_tool_use_template_is_used_for_requests_with_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with tools"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.from_folder(tmp_path)
    assert template.render(MESSAGES) == "plain"
    assert template.render(MESSAGES, tools=[{"name": "f"}]) == "with tools"


def test_named_templates_can_be_files(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    template = ChatTemplate.from_folder(tmp_path)
    assert template.render(MESSAGES) == "plain"
    assert template.render(MESSAGES, tools=[{"name": "f"}]) == "with tools"
    # As in transformers, the file with the name "default" takes precedence.
    (tmp_path / "additional_chat_templates" / "default.jinja").write_text("by name")
    assert ChatTemplate.from_folder(tmp_path).render(MESSAGES) == "by name"


def test_named_templates_can_be_in_a_table_or_a_list(tmp_path: Path) -> None:
    as_list = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    for templates in (as_list, {"default": "plain", "tool_use": "tools"}):
        config = {"chat_template": templates}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        template = ChatTemplate.from_folder(tmp_path)
        assert template.render(MESSAGES) == "plain"
        assert template.render(MESSAGES, tools=[{"name": "f"}]) == "tools"


def test_byte_order_mark_is_not_part_of_the_template(tmp_path: Path) -> None:
    path = tmp_path / "chat_template.jinja"
    path.write_text("{{ messages[0].content }}", encoding="utf-8-sig")
    messages = [{"role": "user", "content": "a"}]
    assert ChatTemplate.from_folder(tmp_path).render(messages) == "a"
    assert ChatTemplate.from_setting(str(path)).render(messages) == "a"


def test_files_without_a_template_are_config_errors(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    for bad in (5, ["plain"], [{"name": "default"}], {"default": 5}):
        config.write_text(json.dumps({"chat_template": bad}))
        with pytest.raises(ConfigError, match="expected a template, a table of them"):
            ChatTemplate.from_folder(tmp_path)
    config.write_text("[" * 10**5)
    with pytest.raises(ConfigError, match="recursion"):
        ChatTemplate.from_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="chat_template.jinja cannot be read"):
        ChatTemplate.from_folder(tmp_path)


@pytest.mark.parametrize(
    "broken", ["{% for %}", "{{ messages", "{{" + "(" * 5000, "{{ messages | no_filter }}"]
)
def test_broken_template_of_the_model_is_not_an_error_of_the_request(
    tmp_path: Path, broken: str
) -> None:
    (tmp_path / "chat_template.jinja").write_text("line one\n" + broken)
    template = ChatTemplate.from_folder(tmp_path)
    (problem,) = template.find_errors()
    assert "chat_template.jinja" in problem and "--chat-template" in problem
    assert ".." not in problem
    with pytest.raises(ChatTemplateError) as raised:
        template.render(MESSAGES)
    assert str(raised.value) == problem
    assert raised.value.http_status == 500


def test_find_errors_checks_every_template(tmp_path: Path) -> None:
    templates = {"default": "plain", "tool_use": "{% if %}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    template = ChatTemplate.from_folder(tmp_path)
    (problem,) = template.find_errors()
    assert "chat_template 'tool_use' of tokenizer_config.json, line 1" in problem
    assert template.render(MESSAGES) == "plain"
    with pytest.raises(ChatTemplateError):
        template.render(MESSAGES, tools=[{"name": "f"}])


def test_broken_template_of_a_request_is_an_error_of_the_request() -> None:
    with pytest.raises(InvalidRequestError, match="cannot be compiled") as raised:
        ChatTemplate("{% for %}").render(MESSAGES)
    assert raised.value.param == "chat_template"
    assert ChatTemplate("fine").find_errors() == []
