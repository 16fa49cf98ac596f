"""One run of m3-serve: a model, a memory plan, a session, a scheduler, and the server on a port."""

import asyncio
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvicorn
from fastapi import FastAPI

from m3_runtime import memory
from m3_runtime.command import one_line
from m3_runtime.engine import Model, SessionOptions
from m3_runtime.errors import ExitCode, InputError, MachineError
from m3_runtime.gguf_reader import gguf_files
from m3_runtime.native import default_threads
from m3_runtime.quantities import format_bytes
from m3_runtime.run import DENSE_WARNING
from m3_runtime.scheduler import Scheduler, SchedulerOptions
from m3_runtime.screen import LoadProgress
from m3_runtime.server.app import AppOptions, new_app
from m3_runtime.server.gate import LOOPBACK
from m3_runtime.server.metrics import Metrics
from m3_runtime.server.service import Limits, Service
from m3_runtime.text import ChatTokenizer

_LEAST_SEQUENCES: Final = 32
_LAST_SECONDS: Final = 5  #: that clients have to take what is left of their answers
_BACKLOG: Final = 2048  #: connections that wait to be accepted


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What the command line asks for; None where it does not say."""

    model: Path
    host: str
    port: int  #: 0: any that is free
    key: str | None
    names: frozenset[str]  #: further ones of the server, in lower case
    name: str | None  #: id of the model
    context: int | None
    cache: int | None  #: tokens of all conversations together
    parallel: int
    queue: int
    limits: Limits
    drain_seconds: int
    thinking: str | None
    device: str
    isa: str
    experts_on: str  #: as for `Model`
    threads: int
    attention: str
    kv_type: str
    index_type: str
    index_scan: str
    exact: bool
    mmap: bool


def serve(options: ServeOptions) -> ExitCode:
    """Opens the model and serves it until a signal ends that: the command without its command line."""
    if options.model.is_dir() and not gguf_files(options.model):
        raise InputError(f"{options.model}: is a folder without GGUF files")
    memory.check_file_maps(options.model)
    # Taken first: that the port is in use shows before hundreds of GB are read.
    with _listening(options.host, options.port) as listener, _opened(options) as model:
        tokenizer = ChatTokenizer(model.gguf.metadata)
        plan = _Plan(options, model)
        plan.say()
        model.place(**plan.session)
        _load(model)
        with model.session(**plan.session) as session, Scheduler(session, plan.scheduling) as scheduler:
            service = Service(
                scheduler,
                tokenizer,
                model.gguf.metadata,
                name=options.name or _name(options.model),
                n_vocab=model.hparams.n_vocab,
                limits=options.limits,
                thinking=options.thinking,
            )
            # Of a server that others cannot reach all names are known.
            is_local = _is_loopback(listener)
            hosts = LOOPBACK | options.names | {options.host.lower()} if is_local or options.names else None
            app = new_app(service, Metrics(scheduler, session), AppOptions(key=options.key, hosts=hosts))
            listener.listen(_BACKLOG)  # who comes from now on is answered
            host = f"[{options.host}]" if ":" in options.host else options.host
            _say(f"{service.name} at http://{host}:{listener.getsockname()[1]}")
            if options.key is None and not is_local:
                _say("warning: others can reach this server, and --api-key is not set")
            _run(app, listener, options.drain_seconds, scheduler.stop)
    return ExitCode.OK


class _Plan:
    """Context, sequences, and the memory that they take."""

    def __init__(self, options: ServeOptions, model: Model) -> None:
        self._options = options
        self._model = model
        trained = model.hparams.context_train
        if options.context is not None and options.context > trained:
            raise InputError(f"--context {options.context}: the file's context is {trained}")
        least = model.plan(**self._session(1, 1))
        room = least.session_room(self._room(), all_experts=options.experts_on == "gpu")
        self.context = options.context or memory.default_context(trained, 0, self._bytes_of_one, room)
        memory.check_session_fits(self._bytes_of_one(self.context), self.context, room)
        self.session = self._session(self.context, self._pages(room))
        self.placement = model.plan(**self.session)
        self.placement.check(self.context, self._room())
        self.scheduling = SchedulerOptions(
            sequences=self.session["sequences"],
            context=self.context,
            block_size=model.hparams.block_size,
            parallel=options.parallel,
            queue=options.queue,
        )

    def _room(self) -> int | None:
        """Bytes of the machine's memory that are left. None if that is unknown."""
        return memory.session_room(0 if self._model.mmap else self._model.weight_bytes)

    def _session(self, context: int, pages: int) -> SessionOptions:
        options = self._options
        return {
            "context": context,
            # Those that no request works on hold what was answered last: the prefixes of what comes next.
            "sequences": max(4 * options.parallel, _LEAST_SEQUENCES),
            "pages": pages,
            "kv_type": options.kv_type,
            "index_type": options.index_type,
            "index_scan": options.index_scan,
            "attention": options.attention,
            "exact": options.exact,
            "threads": options.threads,
        }

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._model.hparams.block_size)

    def _bytes(self, context: int, pages: int) -> int:
        return self._model.memory(**self._session(context, pages)).total

    def _bytes_of_one(self, context: int) -> int:
        """Of a session whose cache holds one full conversation."""
        return self._bytes(context, self._blocks(context))

    def _pages(self, room: int | None) -> int:
        """Of the pool: what --cache asks for, else as many as all requests may need and half of the memory holds."""
        least, given = self._blocks(self.context), self._options.cache
        if given is not None:
            if given < self.context:
                raise InputError(f"--cache {given}: expected at least the context, {self.context} tokens")
            pages = min(self._blocks(given), self._session(self.context, 0)["sequences"] * least)
            memory.check_session_fits(self._bytes(self.context, pages), given, room)
            return pages
        most = self._options.parallel * least
        if room is None or most == least:
            return most
        start = self._bytes(self.context, least)
        page = (self._bytes(self.context, most) - start) / (most - least)
        return max(least, min(most, least + int((room / 2 - start) / page)))

    def say(self) -> None:
        """The status and the plan on stderr."""
        options, model, pages = self._options, self._model, self.session["pages"]
        threads = f", {options.threads or default_threads()} threads" if model.backend_name == "cpu" else ""
        _say(
            f"{model.path}: {format_bytes(model.weight_bytes)}; attention {options.attention}; context {self.context}, "
            f"{options.parallel} requests at once; cache of {pages * model.hparams.block_size} tokens, K/V "
            f"{options.kv_type}, index keys {options.index_type}, {format_bytes(self._bytes(self.context, pages))}; "
            f"{model.backend_name} {model.device_name}{threads}"
        )
        for line in self.placement.table():
            _say(line)
        if options.attention == "dense":
            _say(DENSE_WARNING)


def _name(path: Path) -> str:
    """The file's name without what is no part of the model's."""
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.resolve().stem if path.is_file() else path.resolve().name)


def _opened(options: ServeOptions) -> Model:
    return Model(
        options.model, device=options.device, isa=options.isa, mmap=options.mmap, experts_on=options.experts_on
    )


def _load(model: Model) -> None:
    progress = LoadProgress(sys.stderr)
    try:
        model.load(progress=progress)
    finally:
        progress.clear()


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that is bound, not listening yet. Raises InputError for a host that is none, or a port in use."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InputError(f"--host {host}: {getattr(error, 'strerror', None) or error}") from None
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise MachineError(f"--host {host} --port {port}: {error.strerror}") from None
        yield listener


def _is_loopback(listener: socket.socket) -> bool:
    address = str(listener.getsockname()[0])
    return address.startswith("127.") or address == "::1"


def _run(app: FastAPI, listener: socket.socket, drain_seconds: int, give_up: Callable[[], None]) -> None:
    """Serves until SIGINT or SIGTERM, then answers what is under way for as long.

    give_up: ends that early, so that clients are told; called when the time is over, and by a second signal.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=drain_seconds + _LAST_SECONDS,
        timeout_keep_alive=65,
        http="h11",
        ws="none",
        loop="asyncio",
    )
    asyncio.run(_Server(config, drain_seconds, give_up).serve(sockets=[listener]))


class _Server(uvicorn.Server):
    """Ends with the exit code of a command that is done, where uvicorn would end by the signal."""

    def __init__(self, config: uvicorn.Config, drain_seconds: int, give_up: Callable[[], None]) -> None:
        super().__init__(config)
        self._drain_seconds = drain_seconds
        self._give_up = give_up
        self._signals = 0

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._drain_seconds, self._give_up)
        await super().shutdown(sockets)
        timer.cancel()

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1
        self.should_exit = True
        if self._signals == 1:
            _say("draining: no new requests; a second signal ends those under way")
        elif self._signals == 2:
            # Not here: the lock that it takes may be held by what the signal has interrupted.
            threading.Thread(target=self._give_up).start()
        else:
            self.force_exit = True


def _say(text: str) -> None:
    """One line of status on stderr."""
    print(f"m3-serve: {one_line(text)}", file=sys.stderr, flush=True)
