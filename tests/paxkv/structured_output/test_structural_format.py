"""Every format of a structural tag takes the texts that have it, and no others."""

import json

import pytest

from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.errors import InvalidRequestError
from paxkv.structured_output.json_schema.schema_cleaner import SchemaCleaner
from paxkv.structured_output.json_schema.schema_probe import LlguidanceProbe
from paxkv.structured_output.structural_format import StructuralFormat
from tests.paxkv.structured_output.demo_grammars import TOKENIZER, make_compiler

COMPILER = make_compiler()
ANY = {"type": "any_text"}
INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}


def const(text):
    return {"type": "const_string", "value": text}


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements):
    return {"type": "sequence", "elements": list(elements)}


def either(*elements):
    return {"type": "or", "elements": list(elements)}


def triggered(**options):
    tags = [tag("<f=a>", INTEGER, "</f>"), tag("<f=b>", const("x"), "</f>"), tag("<g>", ANY, "!")]
    return {"type": "triggered_tags", "triggers": ["<f", "<g"], "tags": tags, **options}


def separated(**options):
    tags = [tag("[", INTEGER, "]"), tag("(", ANY, ")")]
    return {"type": "tags_with_separator", "tags": tags, "separator": ", ", **options}


def compile_format(form, **options):
    source = json.dumps({"type": "structural_tag", "format": form})
    return COMPILER.compile(StructuredOutputsParams(structural_tag=source, **options))


def has_format(form, text, **options):
    matcher = compile_format(form, **options)
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


FORMATS = {
    "const": (const('say "é"\n😀/\\'), ['say "é"\n😀/\\'], ["say", 'say "é"\n😀/\\ ']),
    "control characters": (const("\x00\x7f\u2028"), ["\x00\x7f\u2028"], ["\x00\x7f"]),
    "schema": (INTEGER, ["12", "-3"], ["a", "1.5", ""]),
    "any": (ANY, ["", "all <f> {"], []),
    "regex": ({"type": "regex", "pattern": "a/+b"}, ["a/b", "a//b"], ["ab", "a/b/"]),
    "lark": ({"type": "grammar", "grammar": 'start: "a" start "b" | "c"'}, ["aacbb"], ["aacb"]),
    "gbnf": ({"type": "grammar", "grammar": 'root ::= "yes" | "no"'}, ["no"], ["noo"]),
    "sequence": (sequence(const("a"), INTEGER, ANY), ["a12", "a1 b"], ["12", "ab"]),
    "or": (either(const("a"), sequence(const("b"), ANY)), ["a", "b", "bc"], ["ac"]),
    "tag": (tag("<t>", INTEGER, ["</t>", "."]), ["<t>5</t>", "<t>5."], ["<t>5", "<t>5</t>."]),
    "tag without an end": (tag("<t>", INTEGER, ""), ["<t>5"], ["<t>"]),
    "text in a tag": (
        sequence(tag("<t>", ANY, ["</t>", "."]), const("!")),
        ["<t>a < b</t>!", "<t></t>!", "<t>a.!"],
        ["<t>a</t>b</t>!", "<t>a.</t>!", "<t>a!"],
    ),
    "regex in a tag": (
        tag("<t>", {"type": "regex", "pattern": "[a-z]*"}, "z"),
        ["<t>z", "<t>abz", "<t>zz"],
        ["<t>ab"],
    ),
    "grammar in a tag": (
        tag("<t>", {"type": "grammar", "grammar": 'start: "a"+'}, "</t>"),
        ["<t>aa</t>"],
        ["<t></t>"],
    ),
    "tags in a tag": (
        tag("<t>", either(tag("<u>", ANY, "</u>"), INTEGER), "</t>"),
        ["<t><u>x</u></t>", "<t>5</t>"],
        ["<t>x</t>", "<t><u>x</t>"],
    ),
    "triggered": (
        triggered(),
        ["", "no tags", "a <f=a>5</f> b <f=b>x</f><g>c!", "< f"],
        ["a <f=c>", "a <f=a>x</f>", "a <f", "<g>c"],
    ),
    "triggered, at least one": (
        triggered(at_least_one=True),
        ["<f=a>5</f>", "<f=a>5</f> b <f=b>x</f> c"],
        ["", "a <f=a>5</f>"],
    ),
    "triggered, one": (
        triggered(stop_after_first=True),
        ["", "a", "a <f=a>5</f>"],
        ["<f=a>5</f> b", "<f=a>5</f><g>c!"],
    ),
    "triggered, exactly one": (
        triggered(stop_after_first=True, at_least_one=True),
        ["<f=a>5</f>", "<g>c!"],
        ["", "a", "a <g>c!", "<g>c! "],
    ),
    "triggered in a tag": (
        sequence(tag("<t>", triggered(), "</t>"), const(".")),
        ["<t></t>.", "<t>a <f=a>5</f> b</t>.", "<t><g>a</t>!</t>."],
        ["<t>a", "<t>a</t>b</t>.", "<t><f=a>5</f>."],
    ),
    "one triggered in a tag": (
        tag("<t>", triggered(stop_after_first=True), "</t>"),
        ["<t>a</t>", "<t>a <f=a>5</f></t>"],
        ["<t>a <f=a>5</f> </t>"],
    ),
    "separated": (
        separated(),
        ["", "[5]", "[5], (a), [6]"],
        ["[5],", "[5] [6]", "[5], ", "(a"],
    ),
    "separated, at least one": (separated(at_least_one=True), ["(a), (b)"], [""]),
    "separated, one": (separated(stop_after_first=True), ["", "(a)"], ["(a), (b)"]),
    "separated in a tag": (tag("<t>", separated(), "</t>"), ["<t></t>", "<t>[5]</t>"], ["<t>[5]"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_accepts_its_texts_and_no_others(name):
    form, good, bad = FORMATS[name]
    assert [text for text in good if not has_format(form, text)] == []
    assert [text for text in bad if has_format(form, text)] == []


def test_options_of_json_hold_within_formats():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": schema}
    for text, options in (
        ('{"a": 1}', {"disable_any_whitespace": True}),
        ('{"b":1}', {"disable_additional_properties": True}),
        ('{ "a":1}', {"whitespace_pattern": "\\n"}),
    ):
        assert has_format(form, text)
        assert not has_format(form, text, **options)
        assert has_format(form, '{"a":1}', **options)


MALFORMED = {
    "unknown": ({"type": "qwen_xml_parameter"}, "one of const_string"),
    "no object": ("any_text", "one of const_string"),
    "text in front": (sequence(ANY, const("a")), "only be the last"),
    "tags in front": (sequence(either(INTEGER, triggered()), const("a")), "only be the last"),
    "endless tag": (tag("<t>", ANY, ""), 'needs an "end"'),
    "end": (tag("<t>", ANY, 5), '"end" of a tag'),
    "trigger": (triggered(triggers=["<f"]), "no trigger begins"),
    "flag": (triggered(at_least_one=1), "true or false"),
    "excludes": ({"type": "any_text", "excludes": ["a"]}, "excludes is not supported"),
    "empty": ({"type": "or", "elements": []}, "list that is not empty"),
    "value": ({"type": "const_string", "value": ""}, "must be a string that is not empty"),
    "regex": ({"type": "regex", "pattern": "(a"}, "."),
    "grammar": ({"type": "grammar", "grammar": "start: foo"}, "unknown name"),
    "schema": ({"type": "json_schema", "json_schema": 5}, "an object"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_format_is_refused_with_the_reason(name):
    form, reason = MALFORMED[name]
    with pytest.raises(InvalidRequestError, match=reason):
        compile_format(form)


def test_formats_may_be_nested_up_to_the_limit():
    form = const("a")
    for _ in range(32):
        form = sequence(form)
    cleaner = SchemaCleaner(LlguidanceProbe(None, None), probes_values=False)
    assert StructuralFormat({}, cleaner).grammar(form)
    with pytest.raises(ValueError, match="at most 32 levels deep"):
        StructuralFormat({}, cleaner).grammar(sequence(form))
