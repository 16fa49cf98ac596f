"""The command m3-serve: a MiniMax-M3 GGUF file behind OpenAI's HTTP interface."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from m3_runtime.cli import Thinking
from m3_runtime.command import guarded, new_app, run
from m3_runtime.errors import InputError, MachineError
from m3_runtime.options import (
    Attention,
    Device,
    Exact,
    ExpertsOn,
    IndexScan,
    IndexType,
    Isa,
    KvType,
    NoMmap,
    Threads,
    Version,
)
from m3_runtime.quantities import parse_size

NAME = "m3-serve"

_PACKAGES = ("fastapi", "llguidance", "prometheus_client", "pydantic", "starlette", "uvicorn")

app = new_app()


@app.command(
    help="Serves a MiniMax-M3 GGUF file over HTTP: OpenAI's /v1/chat/completions and /v1/completions, /v1/models, "
    "/health, /metrics, and a page to chat at /. Ctrl-C and SIGTERM let requests end that are under way.",
    epilog="Exit codes: 0 ended by a signal after all requests were answered; 2 the file or the arguments are wrong; 4 "
    "memory, the device, the port or a package is missing; 70 a bug; 130 interrupted while loading.",
)
@guarded
def serve_command(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL.gguf", help="File to serve; of a split model any file, or the folder.", show_default=False
        ),
    ],
    host: Annotated[
        str, typer.Option("--host", metavar="HOST", help="Address to listen at; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port; 0 takes one that is free.")
    ] = 8080,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            envvar="M3_API_KEY",
            help="Asked of every request as Authorization: Bearer KEY, but for /health and the page. The environment "
            "variable keeps it out of the list of processes.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="A further name under which requests are answered, where a proxy passes its own on; may be given "
            "several times. Without it a server on loopback answers to localhost and its addresses, any other to all.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="ID", help="Id of the model. Default: the name of the file.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            metavar="N",
            min=1,
            help="Tokens of one conversation with its answer. Without it 32768, at most the file's context; less if "
            "half of the free memory does not hold it.",
        ),
    ] = None,
    cache: Annotated[
        int | None,
        typer.Option(
            "--cache",
            metavar="N",
            min=1,
            help="Tokens that the cache holds, those of requests at work and of earlier ones together. Without it as "
            "many as all requests at once may need, less if half of the free memory does not hold them.",
        ),
    ] = None,
    parallel: Annotated[
        int, typer.Option("--parallel", metavar="N", min=1, max=256, help="Requests computed at the same time.")
    ] = 8,
    queue: Annotated[
        int,
        typer.Option("--queue", metavar="N", min=0, max=10000, help="Requests that wait beside them; more get 429."),
    ] = 64,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--max-tokens",
            metavar="N",
            min=1,
            help="Most tokens of an answer that a request may ask for, and what it gets if it does not say. Without it "
            "the context is the limit.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", min=1, help="Seconds from the arrival of a request to its end.")
    ] = 3600.0,
    max_body: Annotated[
        str, typer.Option("--max-body", metavar="SIZE", help="Most bytes of a request, also as 16M.")
    ] = "16M",
    drain: Annotated[
        int,
        typer.Option("--drain", metavar="S", min=0, help="Seconds that requests under way have left after SIGTERM."),
    ] = 30,
    thinking: Annotated[
        Thinking | None,
        typer.Option(
            "--thinking",
            help="For requests that do not say: think before every answer, never, or when the model sees fit. Without "
            "it the chat template decides.",
        ),
    ] = None,
    device: Device = "auto",
    threads: Threads = 0,
    attention: Attention = "sparse",
    kv_type: KvType = "f16",
    index_type: IndexType = "f32",
    index_scan: IndexScan = "auto",
    exact: Exact = False,
    isa: Isa = "auto",
    no_mmap: NoMmap = False,
    experts_on: ExpertsOn = "auto",
    version: Version = False,
) -> int:
    missing = [package for package in _PACKAGES if find_spec(package) is None]
    if missing:
        raise MachineError(f"{', '.join(missing)}: not installed; pip install 'm3-gguf[server]' installs them")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise InputError("--api-key: expected printable ASCII without a space at an end")
    if name is not None and not name.strip():
        raise InputError("--name: the id is empty")
    body_bytes = parse_size(max_body, "--max-body")
    # Here, so that an engine that cannot be loaded is an error of the command like any other.
    from m3_runtime.server.run import ServeOptions, serve
    from m3_runtime.server.service import Limits

    return serve(
        ServeOptions(
            model=model,
            host=host,
            port=port,
            key=api_key,
            names=frozenset(host.lower() for host in allow_host or ()),
            name=name,
            context=context,
            cache=cache,
            parallel=parallel,
            queue=queue,
            limits=Limits(max_tokens=max_tokens, seconds=timeout, body_bytes=body_bytes),
            drain_seconds=drain,
            thinking=thinking and thinking.value,
            device=device,
            isa=isa,
            experts_on=experts_on,
            threads=threads,
            attention=attention,
            kv_type=kv_type,
            index_type=index_type,
            index_scan=index_scan,
            exact=exact,
            mmap=not no_mmap,
        )
    )


def main() -> NoReturn:
    """Entry point of m3-serve."""
    run(app, NAME)


if __name__ == "__main__":
    main()
