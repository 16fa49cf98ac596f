"""The real m3-serve in a process of its own."""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_SECONDS = 60.0


class ServerProcess:
    """Started, and ready when the constructor returns. `lines` are those of its stderr."""

    def __init__(self, model: Path, *arguments: object) -> None:
        code = "from m3_runtime.start import m3_serve; m3_serve()"
        command = [sys.executable, "-c", code, str(model), "--port", "0", "--threads", "1", *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'runtime'}"}
        environment.pop("M3_API_KEY", None)
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines: list[str] = []
        found: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(found,), daemon=True)
        self._reader.start()
        url = found.get(timeout=_SECONDS)
        assert url is not None, self.lines
        self.url = url
        self.port = int(url.rpartition(":")[2])

    def _read(self, found: "queue.Queue[str | None]") -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if match := re.search(r" at (http://\S+)$", line.rstrip()):
                found.put(match[1])
        found.put(None)

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        self._reader.join(_SECONDS)
        if self.process.stderr is not None:
            self.process.stderr.close()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def request(
        self,
        path: str,
        body: object = None,
        *,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        method: str | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers in lower case and body of a response; a body is sent as JSON."""
        if body is not None:
            data = json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        asked = urllib.request.Request(self.url + path, data=data, headers=sent, method=method)
        try:
            with urllib.request.urlopen(asked, timeout=_SECONDS) as answer:
                return answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, {k.lower(): v for k, v in error.headers.items()}, error.read()

    def error(self, path: str, body: object = None, **options: Any) -> tuple[int, dict[str, Any]]:
        """Status and error of a request that is refused, whose shape is checked."""
        status, _, data = self.request(path, body, **options)
        answer = json.loads(data)
        assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}, answer
        assert "\n" not in answer["error"]["message"]
        return status, answer["error"]

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric, 0 if it is not there yet."""
        from prometheus_client.parser import text_string_to_metric_families

        _, _, data = self.request("/metrics")
        for family in text_string_to_metric_families(data.decode()):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return float(sample.value)
        return 0.0
