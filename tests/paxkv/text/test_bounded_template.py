"""A template cannot leave its sandbox, run without end, or produce huge texts."""

import time

import jinja2
import pytest

from paxkv.text.bounded_template import BoundedEnvironment


def _render(source: str, *, max_s: float = 60.0, **variables: object) -> str:
    environment = BoundedEnvironment(extensions=[])
    return environment.render(environment.from_string(source), variables, max_s=max_s)


ENDLESS = {
    "nested loops": "{% set xs = range(99999)|list %}{% for a in xs %}{% for b in xs %}"
    "{% endfor %}{% endfor %}",
    "loops over short lists": "{% set xs = range(40)|list %}"
    + "{% for a in xs %}" * 9
    + "{% endfor %}" * 9,
    "recursive macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "printing": "{% set xs = range(99999)|list %}{% for a in xs %}{% for b in xs %}x{% endfor %}"
    "{% endfor %}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_endless_template_is_stopped(source):
    start_s = time.monotonic()
    with pytest.raises(jinja2.TemplateError, match="takes too long|more than"):
        _render(source, max_s=0.3)
    # Without the limit, it would run for hours.
    assert time.monotonic() - start_s < 60


HUGE = {
    "repeated": "{{ 'x' * 10 ** 9 }}",
    "repeated from the left": "{{ 999999999 * 'x' }}",
    "doubled by ~": "{% set ns = namespace(x='x') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubled by +": "{% set ns = namespace(x='x') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "padded by a filter": "{{ 'x'|center(10000000000) }}",
    "padded by a method": "{{ 'x'.ljust(10000000000) }}",
    "padded by a format": "{{ '%9999999999d' % 1 }}",
    "padded by a format with its width apart": "{{ '%-5.*f' % (10000000000, 1) }}",
    "padded by a filter's format": "{{ '%9999999999d'|format(1) }}",
    "padded by a filter's format with its width apart": "{{ '%*d'|format(10000000000, 1) }}",
    "padded by str.format": "{{ '{:9999999999}'.format(1) }}",
    "padded by a nested width": "{{ '{:{d[w]}}'.format(1, d={'w': 10000000000}) }}",
    "padded by a width of a map": "{{ '{a:{w}}'.format_map({'a': 1, 'w': 10000000000}) }}",
    "padded by many widths": "{{ ('{:30000000}' * 400).format(*([1] * 400)) }}",
    "padded as HTML": "{{ ('{:{d[w]}}'|safe).format(1, d={'w': 10000000000}) }}",
    "filled up": "{{ [1]|batch(10000000000, 0)|list }}",
    "sliced": "{{ [1]|slice(10000000000)|list }}",
    "power": "{{ 9 ** 999999999 }}",
}


@pytest.mark.parametrize("source", HUGE.values(), ids=HUGE)
def test_template_cannot_make_a_huge_string(source):
    with pytest.raises(jinja2.TemplateError, match="it (makes|uses)"):
        # Variables, because jinja would fold constants when it compiles the template.
        _render(source)


ESCAPES = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "attr filter": "{{ ''|attr('__class__') }}",
    "format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "append": "{{ messages.append(1) }}",
    "cycler": "{{ cycler.__init__.__globals__.os }}",
}


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES)
def test_template_can_access_only_its_variables(source):
    try:
        text = _render(source, messages=[], raise_exception=lambda message: None)
    except jinja2.TemplateError:
        return
    assert "class" not in text and "module" not in text


def test_loops_and_texts_render_as_in_jinja():
    source = (
        "{% for x in xs %}{{ loop.index }}/{{ loop.length }}:{{ x ~ 'a' ~ 1 }}"
        "{{ ',' if not loop.last }}{% endfor %}|{% for k, v in d.items() %}{{ k + v }}{% endfor %}"
        "|{% for c in 'ab' %}{{ loop.revindex }}{{ c }}{% endfor %}"
        "|{{ '%s-%*d' % ('x', 3, 7) }}|{{ '%%*d %s' % (5000000,) }}|{{ '%s-%02d'|format('x', 3) }}"
        "|{{ '{:>{w}}'.format('a', w=3) }}{{ '{a}'.format_map({'a': 1}) }}"
        "|{{ ('<{}>'|safe).format('<') }}|{{ [1, 2, 3]|batch(2, 0)|list }}"
        "|{{ [1, 2, 3]|slice(2)|list }}|{{ '%s-%02d' % ('x', 3) }}|{{ 'ab'|center(4) }}"
        "|{{ [1] + [2] }}|{{ 'a b'|wordwrap(1) }}"
    )
    variables = {"xs": ["p", "q"], "d": {"k": "v"}}
    plain = jinja2.Environment().from_string(source).render(variables)
    assert _render(source, **variables) == plain
    assert plain.startswith(
        "1/2:pa1,2/2:qa1|kv|2a1b|x-  7|%*d 5000000|x-03|  a1|<&lt;>|[[1, 2], [3, 0]]|"
    )


def test_large_number_can_be_passed_to_macros_and_containers():
    """Macros receive arguments of tool calls, such as timestamps."""
    source = (
        "{% macro show(x) %}{{ caller(x) if caller else x }}{% endmacro %}{{ show(t) }}"
        "{% call(x) show(t) %}{{ x }}{% endcall %}{% set ns = namespace(t=t) %}{{ ns.t }}"
        "{{ dict(a=t).a }}{{ {}.get('a', t) }}{% for x in [t] %}{{ loop.changed(x) }}{% endfor %}"
        "{{ [t].index(t) }}{{ (t,).count(t) }}{{ '**%d**' % (t,) }}"
    )
    assert _render(source, t=1_700_000_000) == "1700000000" * 5 + "True01**1700000000**"
