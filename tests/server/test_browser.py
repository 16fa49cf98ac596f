"""The page at / in headless Chromium: with the real server, and with answers that mean harm."""

import json
from collections.abc import Iterator

import pytest

from browser import CHROMIUM, Browser

# Answers the next request with these events in place of the server; without an end if `hangs`.
ANSWER = """((parts, hangs) => {
    const own = window.fetch;
    window.fetch = (url, options) => {
        window.fetch = own;
        window.sent = JSON.parse(options.body);
        window.signal = options.signal;
        const stream = new ReadableStream({start(to) {
            const write = (text) => to.enqueue(new TextEncoder().encode(text));
            parts.forEach((delta) => write("data: " + JSON.stringify({choices: [{delta}]}) + "\\n\\n"));
            if (!hangs) {
                write('data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\\n\\ndata: [DONE]\\n\\n');
                to.close();
            }
            options.signal.addEventListener("abort", () => to.error(options.signal.reason));
        }});
        return Promise.resolve(new Response(stream));
    };
})"""
IDLE = "document.getElementById('log').getAttribute('aria-busy') === 'false' && !document.getElementById('send').hidden"
LAST = "document.getElementById('log').lastElementChild"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def page(browser, server) -> Browser:
    browser.open(f"{server.url}/", width=1000)
    browser.wait_for("document.getElementById('model').textContent === 'm3-nano'")
    return browser


def ask(page: Browser, text: str) -> None:
    page.write(text)
    page.press("Enter", "\r")


def answered(page: Browser, *parts: dict, hangs: bool = False) -> None:
    """Asks something, to which the page gets this answer."""
    page.value(f"{ANSWER}({json.dumps(parts)}, {json.dumps(hangs)})")
    ask(page, "Hello")
    if not hangs:
        page.wait_for(IDLE)


def test_a_chat_by_keyboard_alone(page, server):
    assert page.value("document.activeElement.id") == "text"
    page.write("What is 7")
    page.press("Enter", "\r", shift=True)  # a new line
    assert page.value("document.getElementById('text').value") == "What is 7\n"
    page.value("document.getElementById('text').value = ''")
    ask(page, "What is 7 plus 5?")
    page.wait_for(f"{IDLE} && document.getElementById('status').textContent.startsWith('Answered')")
    assert "12" in page.value(f"{LAST}.lastElementChild.textContent")
    assert page.value(f"{LAST}.querySelector('details').open") is False
    assert page.value(f"{LAST}.querySelector('details').textContent").startswith("Thought")
    ask(page, "What is 9 + 4?")
    page.wait_for("document.querySelectorAll('.message').length === 4")
    page.wait_for(IDLE)
    assert page.messages == []
    assert page.requests and all(url.startswith((server.url, "data:")) for url in page.requests)
    for _ in range(3):
        page.press("Tab")
    assert page.value("document.activeElement.id") not in ("text", "")
    page.value("document.getElementById('new').click()")
    assert page.value("document.querySelectorAll('.message').length") == 0


HARM = [
    "<img src=x onerror='window.harmed=1'><script>window.harmed=2</script>",
    "```html\n<svg onload='window.harmed=3'></svg>\n```\n**<b onclick=x>bold</b>** `<i>code</i>`\n\n",
    "<iframe srcdoc='<script>parent.harmed=4</script>'></iframe>[x](javascript:window.harmed=5)",
]


def test_what_a_model_writes_is_text(page):
    parts = [{"content": text} for text in HARM]
    parts += [{"reasoning_content": HARM[0]}]
    call = {"index": 0, "id": "x", "function": {"name": HARM[0], "arguments": HARM[2]}}
    answered(page, *parts, {"tool_calls": [call]})
    made = page.value("[...document.getElementById('log').querySelectorAll('*')].map(e => e.localName)")
    assert set(made) <= {"article", "h2", "div", "p", "pre", "code", "strong", "details", "summary"}
    text = page.value(f"{LAST}.textContent")
    assert text.count(HARM[0]) == 3 and HARM[2] in text and "<svg onload='window.harmed=3'></svg>" in text
    assert page.value("window.harmed") is None
    # Were one to come through, the policy would stop it, as it does here.
    page.value("document.body.insertAdjacentHTML('beforeend', \"<img src=x onerror='window.harmed=6'>\")")
    before = page.value("performance.now()")
    page.wait_for(f"performance.now() > {before} + 100")
    assert page.value("window.harmed") is None
    assert page.messages and all("Content Security Policy" in message for message in page.messages)


def test_stopping_and_failing(page):
    answered(page, {"content": "One, two"}, hangs=True)
    page.wait_for(f"{LAST}.textContent.includes('two')")
    assert page.value("document.getElementById('log').getAttribute('aria-busy')") == "true"
    assert page.value("document.getElementById('stop').hidden") is False
    page.press("Escape")
    page.wait_for(IDLE)
    assert page.value("signal.aborted") and page.value(f"{LAST}.textContent").endswith("One, twostopped")
    answered(page, {"content": "Three"})
    # What was stopped is part of the conversation.
    assert [m["content"] for m in page.value("sent.messages")] == ["Hello", "One, two", "Hello"]
    page.value("document.getElementById('most').value = 100000")
    ask(page, "Too much")
    page.wait_for(IDLE)
    assert "maximum context length is 2048 tokens" in page.value("document.querySelector('[role=alert]').textContent")
    assert page.value("document.getElementById('text').value") == "Too much"  # not lost


def test_thinking_that_was_taken_for_text(page):
    answered(
        page, {"content": "so so"}, {"reasoning_content": "so so", "content_was_reasoning": True}, {"content": "Yes"}
    )
    assert page.value(f"{LAST}.lastElementChild.textContent") == "Yes"
    assert page.value(f"{LAST}.querySelector('details p').textContent") == "so so"


def test_it_can_be_used_without_seeing_it(page):
    fields = "[...document.querySelectorAll('input, textarea, select')]"
    assert page.value(f"{fields}.filter(e => !e.labels.length).map(e => e.id)") == []
    assert page.value("document.documentElement.lang") == "en"
    assert page.value("document.querySelectorAll('h1, main, [role=log][aria-live=polite], [role=status]').length") == 4
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    named = {(node["role"]["value"], node["name"]["value"]) for node in tree if node.get("name", {}).get("value")}
    assert {("textbox", "Your message"), ("button", "Send"), ("button", "New chat"), ("log", "Conversation")} <= named


@pytest.mark.parametrize("dark", [False, True])
def test_on_a_phone_in_light_and_dark(browser, server, dark):
    browser.open(f"{server.url}/", width=360, height=640, dark=dark)
    answered(
        browser, {"content": "long" * 100 + "\n\n```\n" + "wide " * 100 + "\n```"}, {"reasoning_content": "x" * 500}
    )
    browser.value("document.getElementById('settings').open = true")
    assert browser.value("document.documentElement.scrollWidth") <= 360
    assert browser.value(f"{LAST}.getBoundingClientRect().right") <= 360
    expected = "rgb(20, 22, 26)" if dark else "rgb(255, 255, 255)"
    assert browser.value("getComputedStyle(document.body).backgroundColor") == expected
    assert browser.value("document.querySelector('#send').getBoundingClientRect().bottom") <= 640
