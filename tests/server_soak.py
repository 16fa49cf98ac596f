"""Ten thousand requests to a real m3-serve, and what it holds meanwhile: server_soak.py MODEL.gguf [COUNT].

One in ten is malformed, one leaves before its answer, one asks for JSON of a schema of its own, three are streamed.
Fails if memory, threads or descriptors grow after the first fifth, or if something is left at work.
"""

import http.client
import json
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from server_process import ServerProcess

_CLIENTS = 24
_PATH = "/v1/chat/completions"
_GROWTH_MB = 16


class Held:
    """What a process holds."""

    def __init__(self, pid: int) -> None:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        self.resident_mb = int(status.split("VmRSS:")[1].split()[0]) // 1024
        self.descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        self.threads = len(list(Path(f"/proc/{pid}/task").iterdir()))

    def __str__(self) -> str:
        return f"{self.resident_mb} MB, {self.threads} threads, {self.descriptors} descriptors"


class Soak:
    """Requests of all kinds, from several clients at once."""

    def __init__(self, server: ServerProcess, count: int, seed: int) -> None:
        self._server = server
        self._seed = seed
        self._left = count
        self._lock = threading.Lock()
        self.statuses: Counter[int | str] = Counter()

    def run(self) -> None:
        clients = [threading.Thread(target=self._client, args=(self._seed + i,)) for i in range(_CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()

    def _client(self, seed: int) -> None:
        draw = random.Random(seed)
        connection = self._connection()
        while self._next():
            kind = draw.randrange(10)
            connection.request("POST", _PATH, self._body(draw, kind), {"Content-Type": "application/json"})
            if kind == 7:
                connection.close()
                connection = self._connection()
                self._count("left")
                continue
            answer = connection.getresponse()
            answer.read()
            self._count(answer.status)
        connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=120)

    def _next(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0

    def _count(self, status: int | str) -> None:
        with self._lock:
            self.statuses[status] += 1

    def _body(self, draw: random.Random, kind: int) -> str:
        if kind == 8:
            return "{"
        text = f"Question {draw.randrange(50)} " * draw.randrange(1, 8)
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": draw.randrange(1, 4), "stream": kind < 3}
        if kind == 9:
            schema = {"type": "object", "properties": {f"key{draw.randrange(100)}": {"type": "string"}}}
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        return json.dumps(body)


def main(model: Path, count: int) -> None:
    with ServerProcess(model, "--cache", 8192, "--queue", _CLIENTS) as server:
        warm: Held | None = None
        for part in range(5):
            start = time.monotonic()
            soak = Soak(server, count // 5, part * _CLIENTS)
            soak.run()
            held = Held(server.process.pid)
            seconds = time.monotonic() - start
            print(f"{(part + 1) * (count // 5)} requests: {held}; {seconds:.0f} s {dict(soak.statuses)}")
            assert set(soak.statuses) <= {200, 400, "left"}
            warm = warm or held
        time.sleep(1)  # those whose client has left
        assert server.metric("m3_requests_running") == server.metric("m3_requests_waiting") == 0
        assert warm is not None and held.resident_mb <= warm.resident_mb + _GROWTH_MB
        assert held.threads <= warm.threads + 1 and held.descriptors <= warm.descriptors + 8
        assert not any("Traceback" in line for line in server.lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10_000)
