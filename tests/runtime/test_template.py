"""Chat templates render as in transformers, and a template can neither escape nor run away."""

import hashlib
import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from m3_runtime.errors import InputError
from m3_runtime.template import MAX_TEMPLATE_CHARACTERS, ChatTemplate

TESTS = Path(__file__).resolve().parents[1]
GOLDEN = json.loads((TESTS / "golden" / "chat_templates.json").read_text(encoding="utf-8"))
REPOSITORY = (TESTS / "chat_template.jinja").read_text(encoding="utf-8")
SHARED = Path(os.environ.get("M3_SHARED", TESTS.parents[1] / "shared"))
OFFICIAL = SHARED / "oracle" / "chat_template.jinja"
TITLES = list(GOLDEN["conversations"])


def render(template: ChatTemplate, title: str) -> str | None:
    case: dict[str, Any] = GOLDEN["conversations"][title]
    tokens = {"bos_token": "]~!b[", "eos_token": "[e~["}
    try:
        return template.render(
            case["messages"],
            tools=case.get("tools"),
            add_generation_prompt=case.get("add_generation_prompt", True),
            variables=tokens | case.get("variables", {}),
        )
    except InputError:
        return None


@pytest.mark.parametrize("name", GOLDEN["rendered"])
def test_renders_as_transformers(name: str):
    template = ChatTemplate(GOLDEN["templates"].get(name, REPOSITORY))
    for title in TITLES:
        assert render(template, title) == GOLDEN["rendered"][name][title], title


@pytest.mark.skipif(not OFFICIAL.exists(), reason=f"no {OFFICIAL}")
@pytest.mark.parametrize("title", TITLES)
def test_the_official_template_renders_as_in_transformers(title: str):
    text = render(ChatTemplate(OFFICIAL.read_text(encoding="utf-8")), title)
    found = None if text is None else hashlib.sha256(text.encode()).hexdigest()
    assert found == GOLDEN["official_sha256"][title]


def test_the_golden_file_covers_errors_and_texts():
    rendered = [text for texts in GOLDEN["rendered"].values() for text in texts.values()]
    assert rendered.count(None) > 50
    assert len(rendered) - rendered.count(None) > 100


def test_a_text_is_not_changed_on_its_way():
    text = "a\r\nb\u2028 {{ 7 * 7 }} <b> \U0001f600 \x00 [e~[ \n\n"
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": text}]) == text


def test_strftime_now():
    before = datetime.now()
    found = ChatTemplate("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}").render([])
    assert 0 <= (datetime.strptime(found, "%Y-%m-%d %H:%M:%S") - before.replace(microsecond=0)).total_seconds() < 60


def test_the_messages_of_the_caller_stay_as_they_are():
    messages = [{"role": "assistant", "content": "a", "reasoning": "b", "name": None}]
    before = json.dumps(messages)
    ChatTemplate("{{ messages[0].reasoning_content }}").render(messages)
    assert json.dumps(messages) == before


def test_what_a_template_asks_for():
    assert "thinking_mode" in ChatTemplate(REPOSITORY).variables
    assert "thinking_mode" not in ChatTemplate("{{ messages }}").variables


def test_of_a_file():
    assert ChatTemplate.from_metadata({"tokenizer.chat_template": "x{{ 1 }}"}).render([]) == "x1"
    with pytest.raises(
        InputError, match=r"^tokenizer\.chat_template: the file has no chat template; only --raw with -p or -f"
    ):
        ChatTemplate.from_metadata({})
    with pytest.raises(InputError, match=r"^tokenizer\.chat_template: expected a string, found list"):
        ChatTemplate.from_metadata({"tokenizer.chat_template": ["a"]})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("line\n{% if %}", "chat template, line 2: TemplateSyntaxError: "),
        ("{% unknown %}", "chat template, line 1: TemplateSyntaxError: Encountered unknown tag 'unknown'"),
        ("{{ 1 | nosuch }}", "No filter named 'nosuch'"),
        ("{% for x in y %}", "chat template, line 1: TemplateSyntaxError"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "chat template: RecursionError"),
        ("{{ 1" + "+1" * 50000 + " }}", "chat template: RecursionError"),
        ("x" * (MAX_TEMPLATE_CHARACTERS + 1), "chat template: 1048577 characters, at most 1048576"),
    ],
    ids=["syntax", "tag", "filter", "open", "nested", "long", "size"],
)
def test_what_is_no_template_is_refused_at_once(source: str, message: str):
    with pytest.raises(InputError) as caught:
        ChatTemplate(source)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''.__class__ }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self._TemplateReference__context }}",
    "{{ self.__init__.__globals__.__builtins__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ dict.__class__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ messages[0].get.__self__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ ('{0.__class__}'|string).format_map({'0': ''}) }}",
    "{{ (messages|map(attribute='__class__')|list)[0].mro() }}",
    "{{ messages|attr('__class__') }}",
    "{% for m in messages %}{{ loop.__class__ }}{% endfor %}",
    "{% macro f() %}{% endmacro %}{{ f.__call__.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages[0].clear() }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_the_sandbox_holds(source: str):
    messages = [{"role": "user", "content": "x"}]
    try:
        found = ChatTemplate(source).render(messages)
    except InputError as error:
        assert str(error).startswith("chat template")
        assert "\n" not in str(error)
    else:
        pytest.fail(f"rendered {found!r}")
    assert messages == [{"role": "user", "content": "x"}]


def test_the_sandbox_bounds_ranges():
    with pytest.raises(InputError, match="OverflowError"):
        ChatTemplate("{% for a in range(10**9) %}{% endfor %}").render([])


def test_a_refusal_says_what_the_template_says():
    with pytest.raises(InputError, match=r"^chat template, line 2 refuses the conversation: no second line$"):
        ChatTemplate("\n{{ raise_exception('no\nsecond   line') }}").render([])


def test_an_error_names_the_line():
    with pytest.raises(InputError, match=r"^chat template, line 3: UndefinedError: .*'nothing'"):
        ChatTemplate("a\nb\n{{ messages[0].nothing.more }}").render([{"role": "user"}])
