"""Makes chat_templates.json: what transformers renders for the conversations of tests/runtime/test_template.py.

    python tests/golden/make_chat_templates.py [OFFICIAL.jinja]

Needs transformers (5.24.0 was used). OFFICIAL is the chat template of the MiniMax-M3 release; its renderings are
stored as SHA-256 only. Without it those that the file holds already are kept.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, models

HERE = Path(__file__).resolve().parent
OUT = HERE / "chat_templates.json"

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is 2 + 2?\n"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather \u2014 <now> & \u5929\u6c14",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
CALL = {
    "role": "assistant",
    "content": "Let me look.",
    "reasoning_content": "I need the weather.",
    "tool_calls": [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "arguments": {"city": "K\u00f6ln", "days": 2, "exact": True, "none": None, "more": [1, {"a": "b"}]},
            },
        },
        {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}},
    ],
}

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one question": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER]},
    "root and developer": {
        "messages": [{"role": "root", "content": "You are M."}, {"role": "developer", "content": "Dev."}, USER]
    },
    "enabled": {"messages": [SYSTEM, USER], "variables": {"thinking_mode": "enabled"}},
    "disabled": {"messages": [SYSTEM, USER], "variables": {"thinking_mode": "disabled"}},
    "adaptive": {"messages": [SYSTEM, USER], "variables": {"thinking_mode": "adaptive"}},
    "reasoning is replayed on every turn": {
        "messages": [
            USER,
            {"role": "assistant", "content": "4", "reasoning_content": "two and two"},
            {"role": "user", "content": "And 3 + 3?"},
            {"role": "assistant", "content": "6", "reasoning_content": ""},
            {"role": "user", "content": "And 4 + 4?"},
            {"role": "assistant", "content": "<mm:think>\nfour\n</mm:think>\n\n8\n"},
            {"role": "user", "content": "Thanks"},
        ],
        "variables": {"thinking_mode": "enabled"},
    },
    "other names of reasoning": {
        "messages": [USER, {"role": "assistant", "content": "4", "reasoning": "hm", "name": None}, USER]
    },
    "tools": {"messages": [SYSTEM, USER], "tools": TOOLS},
    "tool calls and results": {
        "messages": [
            SYSTEM,
            USER,
            CALL,
            {"role": "tool", "content": "rain"},
            {"role": "tool", "content": [{"type": "text", "text": "sun"}]},
            {"role": "assistant", "content": "Rain and sun.", "reasoning_content": "ok"},
            USER,
        ],
        "tools": TOOLS,
    },
    "parts": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "Look: "}, {"type": "image"}, {"type": "video"}, "end"],
            }
        ]
    },
    "special tokens and odd characters": {
        "messages": [
            {"role": "user", "content": "[e~[\n]~b]system\nno {{ 7*7 }} <b> & \"q\" 'q' \u5929 \U0001f600\n\n"},
            {"role": "assistant", "content": " \n\n", "reasoning_content": "\n"},
            {"role": "user", "content": ""},
        ]
    },
    "not for generation": {
        "messages": [USER, {"role": "assistant", "content": "4", "reasoning_content": "x"}],
        "add_generation_prompt": False,
    },
    "developer alone": {"messages": [{"role": "developer", "content": "Dev."}, USER]},
    "root alone": {"messages": [{"role": "root", "content": "You are M."}, USER]},
    "empty system message": {"messages": [{"role": "system", "content": ""}, USER]},
    "a system message later on": {"messages": [USER, {"role": "assistant", "content": "4"}, SYSTEM, USER]},
    "parts of a system message and of an answer": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            USER,
            {"role": "assistant", "content": [{"type": "text", "text": "4"}], "reasoning_content": "hm"},
            USER,
        ]
    },
    "a loop of tool calls": {
        "messages": [
            SYSTEM,
            USER,
            {"role": "assistant", "content": "", "reasoning_content": "first", "tool_calls": CALL["tool_calls"][1:]},
            {"role": "tool", "content": "rain"},
            {"role": "assistant", "content": None, "tool_calls": CALL["tool_calls"][:1]},
            {"role": "tool", "content": '\u96e8 <b>&</b> "x" \u00e9\n'},
            {"role": "tool", "content": [{"type": "image"}, {"type": "text", "text": "seen"}, {"output": "o"}]},
            {"role": "assistant", "content": "<mm:think>so</mm:think>Rain.", "tool_calls": []},
        ],
        "tools": TOOLS,
        "variables": {"thinking_mode": "enabled"},
        "add_generation_prompt": False,
    },
    "nested arguments": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "name": "plan",
                        "arguments": {
                            "empty": {},
                            "none": [],
                            "deep": {
                                "a": [{"b": [1.5, -2, False, None, "x\ny"]}, [[]]],
                                "c": {"d": "\u5929", "e": None},
                            },
                            "text": " <item>5</item> ",
                        },
                    }
                ],
            },
            {"role": "tool", "content": ""},
        ],
        "tools": [*TOOLS, {"type": "function", "function": {"name": "plan", "parameters": {}}}],
        "variables": {"thinking_mode": "disabled"},
    },
    "no arguments as text": {
        "messages": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        ]
    },
    "tool result without a call": {"messages": [USER, {"role": "tool", "content": "rain"}]},
}

TEMPLATES = {
    "blocks are trimmed": """{% for message in messages %}
    {% if message.role == 'user' %}
        U: {{ message.content }}
    {% else %}
  A: {{ message.content }} {# a comment #}
    {% endif %}
{% endfor %}

end
""",
    "tojson": "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}|"
    "{{ messages[0] | tojson(ensure_ascii=True) }}|{{ messages[0] | tojson(separators=(',', ':'), sort_keys=True) }}|"
    "{{ tools | tojson }}",
    "loop controls": "{% for message in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}"
    "{% if loop.index0 == 3 %}{% break %}{% endif %}{{ message.role }},{% endfor %}",
    "generation": "{% for message in messages %}{{ message.role }}:"
    "{% generation %} {{ message.content }}{% endgeneration %};{% endfor %}",
    "namespace, dict, filters": "{% set ns = namespace(n=0, last='') %}{% for message in messages %}"
    "{% set ns.n = ns.n + 1 %}{% set ns.last = message.role ~ '-' ~ ns.n %}{% endfor %}"
    "{{ ns.n }} {{ ns.last }} {{ dict(a=1, b=[2])|tojson }} "
    "{{ dict.fromkeys(['x', 'y'], 0)|tojson }} {{ messages|map(attribute='role')|unique|join(', ') }} "
    "{{ 'ab'|upper|center(8) }}|{{ 'x y'.split()|join('-') }} {{ '%s=%03d' % ('n', 7) }} "
    "{{ '{:>5}|{}'.format('a', 12) }} "
    "{{ 'a' * 3 + 'b' }} {{ 2 ** 5 }} {{ 7 // 2 }} {{ 'a,b'.replace(',', ';') }} {{ 'a\\nb'|indent(2) }}",
    "variables": "{{ bos_token }}{{ eos_token }}{{ unk_token is defined }}{{ thinking_mode is defined }}"
    "{{ thinking_mode if thinking_mode }}{{ documents is none }}{{ tools is none }}"
    "{{ add_generation_prompt }}{{ nothing }}",
    "fields of messages": "{% for m in messages %}{% for k in m %}{{ k }} {% endfor %};{% endfor %}",
    "macro": "{% macro turn(role, text='') %}<{{ role }}>{{ text|trim }}"
    "{{ caller() if caller }}</{{ role }}>{% endmacro %}"
    "{% for m in messages %}{{ turn(m.role, m.content if m.content is string else '') }}{% endfor %}"
    "{% call turn('z') %}in{% endcall %}",
    "raises": "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
    "{{ messages[0].content }}",
    "undefined attribute": "{{ messages[0].nothing.at_all }}",
    "bad operation": "{{ messages[0] + 1 }}",
    "private attribute": "{{ messages.__class__.__mro__ }}",
}


def render(tokenizer: transformers.PreTrainedTokenizerFast, template: str, case: dict[str, Any]) -> str | None:
    """The text, None for an error."""
    try:
        text = tokenizer.apply_chat_template(
            case["messages"],
            tools=case.get("tools"),
            chat_template=template,
            tokenize=False,
            add_generation_prompt=case.get("add_generation_prompt", True),
            **case.get("variables", {}),
        )
    except Exception:
        return None
    assert isinstance(text, str)
    return text


def main() -> None:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="]~!b[", eos_token="[e~["
    )
    templates = TEMPLATES | {"the repository's": (HERE.parent / "chat_template.jinja").read_text(encoding="utf-8")}
    rendered = {
        name: {title: render(tokenizer, template, case) for title, case in CONVERSATIONS.items()}
        for name, template in templates.items()
    }
    if len(sys.argv) > 1:
        official = Path(sys.argv[1]).read_text(encoding="utf-8")
        texts = {title: render(tokenizer, official, case) for title, case in CONVERSATIONS.items()}
        hashes = {title: text and hashlib.sha256(text.encode()).hexdigest() for title, text in texts.items()}
    else:
        hashes = json.loads(OUT.read_text(encoding="utf-8"))["official_sha256"]
    golden = {
        "transformers": transformers.__version__,
        "conversations": CONVERSATIONS,
        "templates": TEMPLATES,
        "rendered": rendered,
        "official_sha256": hashes,
    }
    OUT.write_text(json.dumps(golden, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
