"""Chat templates: rendered as transformers renders them; hostile ones are errors within seconds and little memory."""

from __future__ import annotations

import json
import resource

import pytest
from transformers.utils.chat_template_utils import render_jinja_template
from weights.samples import CHAT_TEMPLATE

from firstlight.errors import ChatTemplateError
from firstlight.weights.chat_template import MAX_TEMPLATE_CHARACTERS, ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What's <b>2 + 2</b> & 'é'?"},
    {
        "role": "assistant",
        "content": "<think>\nhm\n</think>\n\n4",
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}],
    },
    {"role": "user", "content": [{"type": "text", "text": "and 3?"}, {"type": "image"}]},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é < ü", "parameters": {"type": "object"}}}]

SAME_AS_TRANSFORMERS = {
    "plain": "{% for m in messages %}{{ m.role }}: {{ m['content'] }}\n{% endfor %}{{ add_generation_prompt }}",
    "blocks": "{%- for m in messages %}\n    {% if loop.first %}\n  {{ loop.index }} of {{ loop.length }}\n  {% else %}x{% endif %}\n{% endfor %}",
    "tojson": "{{ tools | tojson }}{{ tools|tojson(indent=2) }}{{ messages[2].tool_calls[0].function.arguments|tojson(sort_keys=true) }}",
    "namespace": "{% set ns = namespace(last=0, text='') %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% set ns.text = ns.text ~ m.role %}{% endif %}{% endfor %}{{ ns.last }}{{ ns.text }}",
    "reverse": "{% for m in messages[::-1] %}{{ m.role }}{% endfor %}{{ messages[1:]|length }}{{ messages|map(attribute='role')|join(', ') }}",
    "controls": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.role }}{% if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}",
    "strings": "{% set c = messages[2].content %}{{ c.split('</think>')[-1].lstrip('\n') }}|{{ c.split('<think>')|last|trim }}|{{ 'x' in c }}|{{ c is string }}|{{ c.replace('h', 'HH') }}|{{ 'a-%s-%d' % ('b', 3) }}|{{ '{} {x}'.format(1, x=2) }}|{{ '-'.join(['a', 'b']) }}",
    "macro": "{% macro show(m, n=1) %}[{{ m.role|upper }}{{ n }}]{% endmacro %}{% for m in messages %}{{ show(m, n=loop.index) }}{% endfor %}{{ show({'role': 'x'}) }}",
    "mapping": "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ messages[0].get('nothing', 'd') }}{{ dict(a=1) }}{{ messages[0]|dictsort }}",
    "select": "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ messages|rejectattr('content', 'string')|list }}{% for m in messages if m.role == 'user' %}{{ loop.index }}{% else %}none{% endfor %}",
    "undefined": "{{ nothing }}{% if nothing is defined %}a{% else %}b{% endif %}{% for x in nothing %}y{% endfor %}{{ nothing|default('z') }}{{ (nothing or [])|length }}",
    "tokens": "{{ bos_token }}{{ eos_token }}{{ enable_thinking }}{% set x %}in a block{% endset %}{{ x|upper }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}",
    "arithmetic": "{{ 2 ** 10 + 7 // 2 - 7 % 4 * 3 }} {{ [1] + [2] }} {{ 'ab' * 3 }} {{ -3|abs }} {{ 7 / 2 }} {{ range(3)|sum }} {{ 3.7|round(1) }}",
    "multimodal": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% elif 'image' in c.type %}<image>{% endif %}{% endfor %}{% endif %}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ n }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}",
    "chatml": CHAT_TEMPLATE.replace("message['content']", "message['content']|string"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME_AS_TRANSFORMERS)
def test_rendered_as_transformers_does(name):
    source, values = SAME_AS_TRANSFORMERS[name], {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = render_jinja_template(
        [MESSAGES], tools=TOOLS, chat_template=source, add_generation_prompt=True, enable_thinking=False, **values
    )
    rendered = ChatTemplate(source, values).render(MESSAGES, tools=TOOLS, enable_thinking=False)
    assert rendered == expected[0]
    assert rendered


def test_a_long_chat_is_within_the_budget():
    messages = [{"role": "user", "content": f"{i} " * 500} for i in range(2000)]
    source = "{% for m in messages %}{% if loop.index < messages|length and messages[loop.index0].role == 'user' %}" + (
        "{{ m.role + '\n' + m.content.strip() }}{% endif %}{% endfor %}"
    )
    assert len(ChatTemplate(source).render(messages)) > 2000 * 1000


def test_the_template_can_refuse():
    template = ChatTemplate(
        "{% if messages[0].role != 'user' %}{{ raise_exception('users first: ' + messages[0].role) }}{% endif %}"
    )
    assert template.render([{"role": "user"}]) == ""
    with pytest.raises(ChatTemplateError, match="refuses these messages: users first: system"):
        template.render([{"role": "system"}])


def test_the_date():
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([]) >= "2025"


def test_failures_are_told():
    for source, message in (
        ("{% if %}", "not valid: TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "failed on these messages: ZeroDivisionError"),
        ("{{ messages.nothing.at_all }}", "failed on these messages: UndefinedError"),
        ("x" * (MAX_TEMPLATE_CHARACTERS + 1), "262145 characters; at most 262144"),
        ("{% include 'x' %}", "other templates are not supported"),
        ("{% for x in [[[]]] recursive %}{{ loop(x) }}{% endfor %}", "recursive loops are not supported"),
    ):
        with pytest.raises(ChatTemplateError, match=message):
            ChatTemplate(source).render([])


NO_WAY_OUT = (
    "{{ ''.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ namespace.__init__ }}",
    "{{ messages.append(1) }}",
    "{{ dict(a=1).update(b=2) }}",
    "{% set ns = namespace(_x=1) %}{% set ns.__class__ = 1 %}",
    "{{ 'a'.encode() }}",
    "{{ self.__init__ }}",
    "{{ lipsum() }}",
)


@pytest.mark.parametrize("source", NO_WAY_OUT)
def test_python_is_out_of_reach(source):
    try:
        assert ChatTemplate(source).render(MESSAGES) == ""  # what isn't allowed is undefined, which prints as nothing
    except ChatTemplateError:
        return


MILLION = "{% set x = 'a' * 1000000 %}"
HUNDRED = "{% for i in range(100) %}"
HOSTILE = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "nested output": "{% for i in range(100000) %}{% for j in range(100000) %}text{% endfor %}{% endfor %}",
    "text in a loop": "{% for i in range(100000) %}" + "x" * 100_000 + "{% endfor %}",
    "constant in a loop": "{% for i in range(100000) %}{{ '" + "x" * 100_000 + "' }}{% endfor %}",
    "text in a macro": "{% macro f() %}" + "x" * 100_000 + "{% endmacro %}{% for i in range(100000) %}{% set z = f() %}{% endfor %}",
    "loop length": "{% for i in range(100000) %}{% for j in range(100000) %}{{ loop.length }}{% break %}{% endfor %}{% endfor %}",
    "string times": "{{ 'x' * 10**10 }}",
    "list times": "{{ [1] * 10**10 }}",
    "times string": "{{ 10**10 * 'x' }}",
    "power": "{{ 10**(10**10) }}",
    "squares": "{% set ns = namespace(x=3) %}" + HUNDRED + "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubled by ~": "{% set ns = namespace(x='ab') %}" + HUNDRED + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubled by +": "{% set ns = namespace(x='ab') %}" + HUNDRED + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubled by blocks": "{% set ns = namespace(x='ab') %}" + HUNDRED + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "lists in lists": "{% set ns = namespace(x=[1]) %}" + HUNDRED + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "tuples in tuples": "{% set ns = namespace(x=(1,)) %}" + HUNDRED + "{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} }}",
    "batches": "{% set ns = namespace(x=[1]) %}" + HUNDRED + "{% set ns.x = [ns.x]|batch(2, ns.x)|list %}{% endfor %}{{ ns.x|tojson }}",
    "compared": "{% set ns = namespace(x=[1], y=[1]) %}" + HUNDRED + "{% set ns.x = [ns.x]|batch(2, ns.x)|list %}{% set ns.y = [ns.y]|batch(2, ns.y)|list %}{% endfor %}{{ ns.x == ns.y }}",
    "ljust": "{{ 'x'.ljust(10**9) }}",
    "center": "{{ ['x']|map('center', 10**9)|list }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format of a format": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format fields": MILLION + "{{ ('{0}' * 100000).format(x) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent precision": "{{ '%.1000000000f' % 1.0 }}",
    "format filter": "{{ '%1000000000d'|format(1) }}",
    "replace": MILLION + "{{ x.replace('a', x) }}",
    "replace nothing": MILLION + "{{ x.replace('', x) }}",
    "replace filter": MILLION + "{{ x|replace('a', x) }}",
    "join": MILLION + "{{ x.join(range(100000)|map('string')) }}",
    "join filter": MILLION + "{{ range(100000)|join(x) }}",
    "join keyword": MILLION + "{{ range(100000)|join(d=x) }}",
    "indent": "{{ ('\n' * 1000000)|indent(10000) }}",
    "indent by text": MILLION + "{{ ('\n' * 1000000)|indent(width=x) }}",
    "tojson indent": "{{ [[1] * 100000]|tojson(indent=10000) }}",
    "sum of lists": "{% set x = [range(100000)|list] * 100 %}{{ x|sum(start=[]) }}",
    "slice filter": "{{ [1]|slice(1000000000)|list }}",
    "batch filter": "{{ [1]|batch(1000000000, 1)|list }}",
    "macro tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "block without end": "{% block a %}{{ self.a() }}{% endblock %}",
    "in a list": "{% set r = range(100000)|list %}{% for i in range(100000) %}{% if -1 in r %}{% endif %}{% endfor %}",
    "select in": "{% set r = range(100000)|list %}{{ r|select('in', r)|list|length }}",
    "slices": "{% set r = range(100000)|list %}{% for i in range(100000) %}{% set x = r[::-1] %}{% endfor %}",
    "counting": "{% set r = range(100000)|list %}{% for i in range(100000) %}{% set x = r.count(-1) %}{% endfor %}",
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "brackets": "{{ " + "[" * 50_000 + "1" + "]" * 50_000 + " }}",
    "filters": "{{ [1]" + "|list" * 20_000 + " }}",
    "generators": "{{ [1]" + "|map('string')" * 5000 + "|list }}",
}  # fmt: skip


@pytest.mark.timeout(100)  # one takes about two seconds on a free core
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_stopped(name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ChatTemplateError) as raised:
        ChatTemplate(HOSTILE[name]).render(MESSAGES)
    assert len(str(raised.value)) < 500
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


def test_messages_that_are_too_large():
    with pytest.raises(ChatTemplateError, match="stopped"):
        ChatTemplate("{{ messages|length }}").render([{"role": "user", "content": "x" * 100_000_001}])


def test_what_templates_cannot_print():
    assert ChatTemplate("{% set ns = namespace(x=1) %}{% set ns.x = [ns, ns] %}{{ ns }}").render([]) == "<namespace>"
    assert json.loads(ChatTemplate("{{ {'a': [1, 'é']}|tojson }}").render([])) == {"a": [1, "é"]}
