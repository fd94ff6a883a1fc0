#!/usr/bin/env python3
"""Writes tests/data/templates.json: templates that together use each construct of the language, and
what jinja2 makes of them under transformers' settings (null: an error)."""
import json,sys
from transformers.utils.chat_template_utils import _compile_jinja_template as C
T=[
"{% for m in messages if m.role != 'tool' %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}{{ loop.revindex }}{{ loop.revindex0 }}{{ m.role }}{% if loop.previtem is defined %}<{{ loop.previtem.role }}{% endif %}{% if loop.nextitem %}>{{ loop.nextitem.role }}{% endif %}\n{% else %}none{% endfor %}",
"{% for x in [] %}a{% else %}empty{% endfor %}{% for x in nothing %}b{% endfor %}",
"{% for a in range(10) %}{% if a == 2 %}{% continue %}{% elif a > 4 %}{% break %}{% else %}{{ a }},{% endif %}{% endfor %}{{ range(5, 0, -2)|list }}",
"{% set ns = namespace(n=0, s='') %}{% for k, v in {'a': 1, 'b': [2, 3]}.items() %}{% set ns.n = ns.n + loop.index0 %}{% set ns.s = ns.s ~ k ~ v %}{% endfor %}{{ ns.n }}{{ ns.s }}",
"{% set x %}  block {{ 1 + 1 }}\n{% endset %}[{{ x }}]{% set y | trim | upper %} up {% endset %}[{{ y }}]",
"{% macro f(a, b='B', c=none) %}{{ a }}-{{ b }}-{{ c }}{% if caller %}({{ caller('in') }}){% endif %};{% endmacro %}{{ f(1) }}{{ f(1, 2, c=3) }}{{ f(b=a, a='q') }}{% call(x) f('z') %}body {{ x }}{% endcall %}{% call(y) f('w') %}plain{% endcall %}",
"{% macro fact(n) %}{{ n if n < 2 else n ~ '*' ~ fact(n - 1) }}{% endmacro %}{{ fact(5) }}",
"{% filter trim | replace('a', 'o') %}  banana {% endfilter %}{% generation %}kept{% endgeneration %}",
"  {% if true %}\n  indented\n    {% endif %}\nline\n{#- comment -#}\n  {%- if true -%}\n   x   \n{%- endif %}\n{{- ' y ' -}}  \n  {%+ if true %} plus{% endif %}\n",
"{{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 2 * 3 + 4 }} {{ 2 + 3 * 4 }} {{ 1.5 + 1 }} {{ -(-3) }} {{ 'a' ~ 1 ~ none ~ true }} {{ 'ab' * 3 }} {{ [1] + [2] }} {{ 1e20 }} {{ 0.1 }} {{ 1e-7 }}",
"{{ 1 < 2 and not 3 <= 2 }} {{ 1 == 1.0 }} {{ 'a' != 'b' }} {{ 'a' in 'abc' }} {{ 2 not in [1, 2] }} {{ 'k' in {'k': 1} }} {{ none or 'x' }} {{ '' and 1 }} {{ 'b' > 'a' }} {{ 3 >= 3 }} {{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 3 > 2 == 2 }} {{ 1 < 2 in [2] }}",
"{{ 'yes' if x is defined else 'no' }}{{ 'a' if false }}|{{ x.y if x is defined else 'safe' }}|{{ (1 if true else 2) + 1 }}",
"{{ 'abcdef'[1:3] }} {{ 'abc'[::-1] }} {{ [1, 2, 3, 4][-2:] }} {{ [1, 2, 3][::2] }} {{ 'äöü'[1] }} {{ [1, 2][5] is undefined }} {{ messages[-1]['role'] }} {{ 'abc'[:-1] }} {{ [1, 2, 3][2:0:-1] }}",
"{{ ' x '.strip() }}|{{ 'xxaxx'.strip('x') }}|{{ ' a'.lstrip() }}|{{ 'a\\n'.rstrip('\\n') }}|{{ 'a,b,c'.split(',') }}|{{ 'a,b,c'.split(',', 1) }}|{{ ' a  b '.split() }}|{{ 'abc'.startswith('ab') }}|{{ 'abc'.endswith(('x', 'c')) }}|{{ 'Ab'.upper() }}{{ 'Ab'.lower() }}|{{ 'a b'.title() }}|{{ 'hELLO'.capitalize() }}|{{ 'aaa'.replace('a', 'b', 2) }}|{{ '{}-{x}'.format(1, x=2) }}|{{ '-'.join(['a', 'b']) }}|{{ 'abcb'.find('b') }}{{ 'abcb'.count('b') }}|{{ '12'.isdigit() }}|{{ 'a\\nb'.splitlines() }}",
"{{ {'a': 1}.get('a') }}{{ {'a': 1}.get('b', 2) }}{{ {'a': 1}.keys()|list }}{{ {'a': 1}.values()|list }}{{ {'b': 1, 'A': 2}|dictsort|map('first')|list }}{{ ({'a': 1}|items|list)[0][1] }}{{ {'x': 1}|length }}",
"{{ x|default('d') }}{{ ''|default('e', true) }}{{ ''|default('f', boolean=true) }}{{ [3, 1, 2]|sort }}{{ [3, 1, 2]|sort(reverse=true) }}{{ ['b', 'A']|sort }}{{ [1, 2]|first }}{{ [1, 2]|last }}{{ [1, 2]|max }}{{ [1, 2]|min }}{{ ['a', 'A', 'b']|unique|list }}{{ 'abc'|reverse }}{{ 'ab'|list }}{{ ' 12 '|int + 1 }}{{ 'x'|int(7) }}{{ 2.7|int }}{{ '1.5'|float }}{{ -3|abs }}{{ 5|string + 'a' }}",
"{{ messages|map(attribute='role')|join(',') }}|{{ ['a', 'b']|map('upper')|list }}|{{ messages|selectattr('role', 'equalto', 'user')|list|length }}|{{ messages|rejectattr('role', 'in', ['user'])|map(attribute='role')|list }}|{{ [1, 2, 3, 4]|select('odd')|list }}|{{ [0, 1, '']|select|list }}|{{ [1, 2]|reject('equalto', 1)|list }}|{{ messages|selectattr('tool_calls', 'defined')|list|length }}",
"{{ {'a': [1, 2.5, true, none, 'é\"\\n'], 'b': {}}|tojson }}{{ [{'a': [1]}, []]|tojson(indent=2) }}{{ 'é😀'|tojson(ensure_ascii=true) }}{{ messages }}{{ ['it\\'s', \"q\"] }}",
"{{ 1 is number }}{{ 'a' is string }}{{ none is none }}{{ true is boolean }}{{ true is true }}{{ false is false }}{{ {} is mapping }}{{ [] is iterable }}{{ [] is sequence }}{{ 1 is integer }}{{ 1.0 is float }}{{ 3 is odd }}{{ 4 is even }}{{ 4 is divisibleby 2 }}{{ 1 is eq 1 }}{{ 1 is ne(2) }}{{ 2 is gt 1 }}{{ 1 is le 1 }}{{ 'a' is in 'abc' }}{{ 1 is not none }}{{ x is not defined }}{{ x is undefined }}{{ 'a' is lower }}{{ range is callable }}{{ 1 is sameas 1 }}",
"{{ 'line\\nnext\\n\\nend'|indent(2) }}|{{ 'a\\nb'|indent(3, true) }}|{{ 'a\\nb'|indent('>', first=true) }}",
"{% set a, b = (1, 2) %}{{ b ~ a }}{% for x in [1, 2] %}{% set a = x %}{% endfor %}{{ a }}{{ dict(k=1).k }}{{ 'it' \"\" if false else 'q' }}{{ (1, 'a')|length }}{{ [[1, 2], [3, 4]]|map('last')|list }}" .replace("{{ 'it' \"\" if false else 'q' }}",""),
"a {% raw %}\n{{ x }} {% if %} {# c #}{%- endraw %} b{% raw -%}  {{ {% endif %} {%- endraw -%} z\n  {% raw %}q{% endraw %}\nnext{% if false %}{% raw %}{% endif %}{% endraw %}{% endif %}x",
"{{ nope is defined and nope.a.b }}{{ true or nope.a.b }}{{ 1 > 2 and 1 / 0 }}",
"{{ 2**10 }} {{ 2**-1 }} {{ 2**3**2 }} {{ -2**2 }} {{ 4**0.5 }} {{ 2*3**2 }} {{ 0**0 }} {{ 2.0**3 }}",
"{{ '\\u00e9\\x41\\x7f\\n\\t\\b\\101\\0\\U0001f600\\q\\'\\\"\\\\\\a\\v\\f\\8\\12x\\\n' }}",
"{% set y = 1 %}{% macro g() %}{{ z is defined }}{{ y }}{% endmacro %}{% for z in [1] %}{{ g() }}{% endfor %}",
"{% raw %}open{{ 1 }}", "{{ 0**-1 }}", "{{ '\\x4' }}", "{{ '\\u12' }}", "{{ raise_exception('no: ' ~ messages|length) }}", "{{ x.y }}", "{{ x() }}", "{{ none + 1 }}", "{{ 'a' + 1 }}", "{{ 1 / 0 }}", "{% for x in none %}{% endfor %}", "{% if true %}open", "{{ 1 }", "{{ 'a'|nofilter }}", "{{ 1 is notest }}", "{% nothing %}", "{{ 'a' < 1 }}", "{% endif %}", "{{ [1, }}", "{{ 'a }}", "{% set messages.x = 1 %}", "{{ x|tojson }}",
]
M=[{"role":"system","content":" Be <|im_end|> brief "},{"role":"user","content":"Hello\n'you'"},{"role":"assistant","content":None,"tool_calls":[{"id":1.5}]},{"role":"tool","content":"x"},{"role":"user","content":"é"}]
out=[]
for t in T:
    try: r=C(t).render(messages=M,tools=None,documents=None,add_generation_prompt=True,bos_token='<s>',eos_token='</s>')
    except Exception as e: r=None
    out.append({"template":t,"rendered":r})
json.dump({"messages":M,"cases":out},open('tests/data/templates.json','w'),ensure_ascii=False,indent=0)
for o in out:
    if o["rendered"] is None: print("refuses", o["template"][:60])
