"""What clients do wrong, and what happens to them: refusals, clients that leave, overload, keys, signals."""

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from m3_runtime import command, serve_cli
from server_process import ROOT, ServerProcess

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "What is 7 plus 5?"}]
#: Goes on for ever: the end token never comes.
ENDLESS = {"prompt": "One, two,", "max_tokens": 1900, "temperature": 1, "logit_bias": {"4052": -100}}


def wait_for(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({}, "messages: is missing", "messages"),
        ({"messages": []}, "messages: .* at least 1 item", "messages"),
        ({"messages": "hi"}, "messages: ", "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "'robot' found", "messages.0"),
        ({"messages": [{"content": "hi"}]}, "messages.0", "messages.0"),
        ({"messages": [{"role": "user", "content": 5}]}, "valid string, found 5", "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads text only", "messages.0.content"),
        (
            {"messages": [{"role": "tool", "tool_call_id": "x", "content": ""}]},
            "no call 'x'",
            "messages.0.tool_call_id",
        ),
        ({"messages": HELLO, "temperature": "hot"}, "temperature: ", "temperature"),
        ({"messages": HELLO, "temperature": 3}, "less than or equal to 2, found 3", "temperature"),
        ({"messages": HELLO, "top_p": -1}, "top_p", "top_p"),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens", "max_tokens"),
        ({"messages": HELLO, "n": 2}, "n: Input should be 1, found 2", "n"),
        ({"messages": HELLO, "frequency_penalty": 9}, "frequency_penalty", "frequency_penalty"),
        ({"messages": HELLO, "stop": [""]}, "1 to 1000 characters", "stop"),
        ({"messages": HELLO, "stop": ["a"] * 17}, "at most 16", "stop"),
        ({"messages": HELLO, "logit_bias": {str(i): 1 for i in range(1025)}}, "at most 1024", "logit_bias"),
        ({"messages": HELLO, "logit_bias": {"x": 1}}, "'x', expected a token id", None),
        ({"messages": HELLO, "top_logprobs": 3}, "needs logprobs", None),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs"),
        (
            {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "a b"}}]},
            "name",
            "tools.0.function.name",
        ),
        ({"messages": HELLO, "tool_choice": "required"}, "there are no tools", None),
        ({"messages": HELLO, "tool_choice": "maybe"}, "'maybe', expected none, auto", "tool_choice"),
        ({"messages": HELLO, "response_format": {"type": "json_schema"}}, "json_schema", "response_format"),
        ({"messages": HELLO, "stream_options": {"include_usage": True}}, "only for stream", None),
        ({"messages": HELLO, "functions": []}, "unrecognized request argument: functions", "functions"),
        ({"messages": HELLO, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x", "chat_template_kwargs.x"),
    ],
)
def test_a_bad_request_is_a_400(server, body, message, param):
    status, error = server.error(CHAT, body)
    assert status == 400 and error["type"] == "invalid_request_error"
    assert re.search(message, error["message"]), error
    assert error["param"] == param


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"\xff\xfe", b"null", b'{"messages":' + b"[" * 100_000, b'{"a":"\\ud800"}']
)
def test_malformed_json(server, data):
    status, error = server.error(CHAT, data=data)
    assert status == 400 and error["code"] in ("invalid_json", "invalid_value")


def test_a_prompt_of_a_megabyte_and_a_body_that_is_too_large(server):
    text = "All work and no play makes Jack a dull boy. " * 24_000
    start = time.monotonic()
    status, error = server.error(CHAT, {"messages": [{"role": "user", "content": text}]})
    assert status == 400 and error["code"] == "context_length_exceeded"
    assert "maximum context length is 2048 tokens; the prompt has " in error["message"]
    assert time.monotonic() - start < 20
    status, error = server.error("/v1/completions", {"prompt": list(range(3000)), "max_tokens": 5})
    assert status == 400 and "the prompt has 3000 and 5 are asked for" in error["message"]
    # Said before it is sent, or found out on the way.
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", CHAT, headers={"Content-Type": "application/json", "Content-Length": str(10**9)})
    with contextlib.closing(connection), connection.getresponse() as answer:
        assert answer.status == 413 and json.loads(answer.read())["error"]["code"] == "body_too_large"


def test_other_paths_methods_and_types(server):
    assert server.error("/v1/nothing")[0] == 404
    assert server.error("/docs")[0] == 404
    assert server.error(CHAT)[0] == 405
    status, error = server.error(CHAT, {"messages": HELLO}, headers={"Content-Type": "text/plain"})
    assert status == 415 and "expected Content-Type: application/json" in error["message"]


def test_pages_of_other_sites_are_refused(server):
    status, error = server.error(CHAT, {"messages": HELLO}, headers={"Origin": "https://evil.example"})
    assert status == 403 and error["code"] == "wrong_origin"
    status, error = server.error("/v1/models", headers={"Host": "evil.example"})
    assert status == 403 and error["code"] == "wrong_host"
    own = {"Origin": server.url, "Host": f"127.0.0.1:{server.port}"}
    assert server.request("/v1/models", headers=own)[0] == 200
    assert server.request("/health", headers={"Host": f"localhost:{server.port}"})[0] == 200


def test_health_and_metrics(server):
    assert json.loads(server.request("/health")[2])["status"] == "ok"
    before = server.metric("m3_generated_tokens_total")
    seen = server.metric("m3_http_requests_total", path=CHAT, status="200")
    assert server.request(CHAT, {"messages": HELLO, "max_tokens": 5})[0] == 200
    assert server.metric("m3_generated_tokens_total") == before + 5
    assert server.metric("m3_http_requests_total", path=CHAT, status="200") == seen + 1
    assert server.metric("m3_requests_running") == 0 and server.metric("m3_pages") >= server.metric("m3_pages_used") > 0
    assert server.metric("m3_token_seconds_count") > 0


# ------------------------------------------------------------------------------------------------- many, and gone ones


def test_32_clients_at_once_get_what_they_would_get_alone(server, client):
    questions = [f"What is {a} plus {b}?" for a in range(2, 10) for b in (3, 5)]

    def ask(i: int) -> str:
        options = {"temperature": 0} if i % 2 else {"temperature": 1, "seed": i}
        messages = [{"role": "user", "content": questions[i % 16]}]
        if i % 3:
            return str(client.chat.completions.create(model="m3-nano", messages=messages, **options).choices[0].message)
        chunks = client.chat.completions.create(model="m3-nano", messages=messages, stream=True, **options)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(ask, range(32)))
    assert [ask(i) for i in range(0, 32, 5)] == together[::5]
    right = [str(int(q.split()[2]) + int(q.split()[4][:-1])) for q in questions * 2]
    assert sum(number in text for number, text in zip(right, together, strict=True)) > 24


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_the_computation(server, stream):
    cancelled = server.metric("m3_requests_ended_total", reason="cancelled")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    body = json.dumps({**ENDLESS, "stream": stream})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    if stream:
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")
        answer.close()
    else:
        wait_for(lambda: server.metric("m3_requests_running") == 1)
    connection.close()
    wait_for(lambda: server.metric("m3_requests_ended_total", reason="cancelled") == cancelled + 1)
    wait_for(lambda: server.metric("m3_requests_running") == 0)


def test_a_client_that_sends_half_a_request(server):
    with socket.create_connection(("127.0.0.1", server.port)) as half:
        half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        half.sendall(b"Content-Length: 100\r\n\r\n{")
    with socket.create_connection(("127.0.0.1", server.port)) as garbage:
        garbage.sendall(b"\x16\x03\x01 no http\r\n\r\n")
        assert b" 400 " in garbage.recv(1000)
    assert server.request("/health")[0] == 200


# --------------------------------------------------------------------------------- other servers: killed, full, drained

KEY = {"Authorization": "Bearer secret"}


def stream_of(server: ServerProcess, body: dict) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(
        "POST", "/v1/completions", json.dumps({**body, "stream": True}), {"Content-Type": "application/json", **KEY}
    )
    return connection, connection.getresponse()


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def test_killed_started_again_full_and_drained(nano_gguf, server):
    body = {"messages": HELLO, "temperature": 0}
    expected = json.loads(server.request(CHAT, body)[2])["choices"]
    with ServerProcess(nano_gguf) as killed:
        port = killed.port
        connection, response = stream_of(killed, ENDLESS)
        assert response.readline().startswith(b"data: ")
        killed.process.kill()
        with contextlib.suppress(OSError, http.client.HTTPException):
            assert b"[DONE]" not in response.read()
        connection.close()

    # On the same port, with a key, for one request at a time and one that waits.
    arguments = (
        "--port",
        port,
        "--parallel",
        1,
        "--queue",
        1,
        "--api-key",
        "secret",
        "--max-body",
        "100000",
        "--drain",
        120,
        "--allow-host",
        "Proxy.example",
    )
    with ServerProcess(nano_gguf, *arguments, "--context", 2048) as again:
        for headers in ({}, *({"Authorization": value} for value in ("Bearer wrong", "Basic secret", "secret"))):
            status, error = again.error("/v1/models", headers=headers)
            assert status == 401 and error["code"] == "invalid_api_key"
        proxied = {**KEY, "Host": "proxy.example", "Origin": "https://proxy.example"}
        assert again.request("/v1/models", headers=proxied)[0] == 200
        assert again.error("/v1/models", headers={**KEY, "Host": "other.example"})[0] == 403
        assert again.error(CHAT, data=b"{")[0] == 401 and again.error("/metrics")[0] == 401
        assert again.request("/health")[0] == 200 and again.request("/")[0] == 200
        with openai.OpenAI(base_url=f"{again.url}/v1", api_key="secret", max_retries=0) as client:
            assert client.models.list().data[0].id == "m3-nano"
        assert json.loads(again.request(CHAT, body, headers=KEY)[2])["choices"] == expected
        status, error = again.error(CHAT, data=b" " * 100_001, headers=KEY)
        assert status == 413 and error["message"] == "the body is larger than 100000 bytes"

        first, first_answer = stream_of(again, {**ENDLESS, "max_tokens": 400})
        assert first_answer.readline().startswith(b"data: ")
        second, second_answer = stream_of(again, ENDLESS)
        wait_for(lambda: json.loads(again.request("/health")[2])["waiting"] == 1)
        status, headers, data = again.request("/v1/completions", ENDLESS, headers=KEY)
        error = json.loads(data)["error"]
        assert status == 429 and error["type"] == "rate_limit_error" and 1 <= int(headers["retry-after"]) <= 60
        assert "1 requests are at work and 1 wait" in error["message"]

        # What is under way is answered, and nobody else is let in. A second signal ends that, and says so.
        again.terminate()
        wait_for(lambda: any("draining" in line for line in again.lines))
        wait_for(lambda: not accepts(port))
        assert first_answer.read().rstrip().endswith(b"data: [DONE]")
        assert second_answer.readline().startswith(b"data: ")
        again.terminate()
        rest = second_answer.read()
        assert b"[DONE]" not in rest and b'"code":"shutting_down"' in rest
        assert again.process.wait(20) == 0
        first.close()
        second.close()
        assert not any("Traceback" in line for line in again.lines), again.lines


def serve(*arguments: object, code: str = "") -> subprocess.CompletedProcess[str]:
    code += "from m3_runtime.start import m3_serve; m3_serve()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime")}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_what_the_command_refuses(nano_gguf, tmp_path: Path, capsys):
    code = "import sys; sys.modules['llguidance'] = None; sys.modules['uvicorn'] = None; "
    run = serve(nano_gguf, code=code)
    assert run.returncode == 4 and run.stdout == ""
    assert run.stderr == "m3-serve: llguidance, uvicorn: not installed; pip install 'm3-gguf[server]' installs them\n"
    for arguments, message in (
        ([tmp_path / "none.gguf"], "none.gguf"),
        ([nano_gguf, "--context", 5000], "--context 5000: the file's context is 4096"),
        ([nano_gguf, "--cache", 100], "--cache 100: expected at least the context"),
        ([nano_gguf, "--api-key", " x"], "--api-key"),
        ([nano_gguf, "--max-body", "0"], "--max-body 0"),
        ([nano_gguf, "--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
    ):
        with pytest.raises(SystemExit) as exit_:
            command.run(serve_cli.app, serve_cli.NAME, [*map(str, arguments), "--port", "0"])
        assert exit_.value.code == 2
        printed = capsys.readouterr()
        assert message in printed.err and printed.err.count("\n") == 1 and printed.out == ""
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as exit_:
        command.run(serve_cli.app, serve_cli.NAME, [str(nano_gguf), "--port", str(taken.getsockname()[1])])
    assert exit_.value.code == 4 and "Address already in use" in capsys.readouterr().err
