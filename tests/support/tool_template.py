"""The chat template of the models that tests make: how a tool call is written, and how it is read from an answer."""

from __future__ import annotations

TEMPLATE = r"""{%- for m in messages -%}
{%- if m.role == 'tool' %} <obs> {{ m.content }}
{%- elif m.role == 'assistant' %} <act>{% if m.content %} {{ m.content }}{% endif %}
{%- for tc in m.tool_calls or [] %} <tool_call>
{%- if tc.function.arguments is string -%}
{%- set arguments = tc.function.arguments | replace('": ', '":') | replace(', "', ',"') -%}
{{ ('{"name":"' + tc.function.name + '","arguments":' + arguments + '}') | replace(' ', '\\u0020') }}
{%- else -%}
{%- set called = {'name': tc.function.name, 'arguments': tc.function.arguments} -%}
{{ called | tojson(separators=(',', ':')) | replace(' ', '\\u0020') }}
{%- endif %}</tool_call>{% endfor %}
{%- if not m.tool_calls %} <|im_end|>{% endif %}
{%- else %} <user> {{ m.content }}{% endif %}
{%- endfor %}{% if add_generation_prompt %} <act>{% endif %}"""
"""A parsed call is rendered to the very token that was sampled: AsyncGRPO tokenizes turns anew. A call ends one."""

RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<act>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
