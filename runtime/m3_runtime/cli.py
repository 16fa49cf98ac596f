"""The command m3-run: a chat with a MiniMax-M3 GGUF file, or one answer to a prompt."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from m3_runtime.choices import OnFull
from m3_runtime.command import guarded, new_app, run
from m3_runtime.errors import InputError
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
from m3_runtime.text import invalid_utf8

NAME = "m3-run"

app = new_app()


class Thinking(StrEnum):
    ENABLED = "enabled"
    DISABLED = "disabled"
    ADAPTIVE = "adaptive"


@app.command(
    help="Chats with a MiniMax-M3 GGUF file. With -p or -f it answers one prompt: the answer goes to stdout, thinking "
    "and status to stderr. In the chat /help lists the commands, and Ctrl-C stops an answer.",
    epilog="Exit codes: 0 done; 2 the file, the prompt or the arguments are wrong; 4 memory or the device is missing; "
    "70 a bug; 130 interrupted.",
)
@guarded
def run_command(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL.gguf", help="File to run; of a split model any file, or the folder.", show_default=False
        ),
    ],
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="Answer this prompt and exit.")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "-f",
            "--file",
            metavar="FILE",
            help="Answer the prompt in a UTF-8 file and exit; - is standard input. Without --raw one line break at its "
            "end is left out.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--max-tokens",
            metavar="N",
            min=1,
            help="Most tokens of one answer, thinking included. Without it an answer ends with an end token or the "
            "context.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            metavar="N",
            min=1,
            help="Tokens of conversation and answer together. Without it 32768, or what prompt and -n need if that is "
            "more; at most the file's context; less if half of the free memory does not hold it.",
        ),
    ] = None,
    device: Device = "auto",
    experts_on: ExpertsOn = "auto",
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            "--dry-run",
            help="Print what the run would take of each device, weights, experts and session, and end without loading "
            "anything. Exit code 4 if it does not fit.",
        ),
    ] = False,
    threads: Threads = 0,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="With -p, -f or --plan: print one JSON object with answer, timings and memory, or the plan."
        ),
    ] = False,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System message in front of the conversation.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="With -p or -f: continue the text as it is, without the chat template.")
    ] = False,
    thinking: Annotated[
        Thinking | None,
        typer.Option(
            "--thinking",
            help="Think before every answer, never, or when the model sees fit. Without it the chat template decides.",
        ),
    ] = None,
    on_full: Annotated[
        OnFull,
        typer.Option(
            "--on-full",
            help="When the context is full: stop ends the answer and refuses messages that do not fit; shift drops the "
            "oldest whole blocks behind the system message, and says so.",
        ),
    ] = OnFull.STOP,
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep",
            metavar="N",
            min=0,
            help="With --on-full shift: never drop the first N tokens, rounded up to whole blocks. The system message "
            "is kept in any case.",
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="In the chat on a terminal: show answers as they are, not as Markdown.")
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            metavar="X",
            help="Divides the logits; 0 always takes the best token. Default: the file's, else 1.0.",
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", metavar="N", help="Keep the N best tokens; 0 keeps all. Default: the file's, else 40."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            metavar="X",
            help="Keep the best tokens that together have probability X. Default: the file's, else 0.95.",
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p",
            metavar="X",
            help="Drop tokens below X times the best one's probability. Default: the file's, else 0.",
        ),
    ] = None,
    repeat_penalty: Annotated[
        float | None,
        typer.Option(
            "--repeat-penalty",
            metavar="X",
            help="Makes the last 64 tokens less likely; 1 is off. Default: the file's, else 1.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", metavar="N", min=0, help="Start of the random numbers. Without it one is drawn and shown."
        ),
    ] = None,
    attention: Attention = "sparse",
    require_sparse: Annotated[
        bool, typer.Option("--require-sparse", help="Exit with 2 if the run would not be sparse.")
    ] = False,
    kv_type: KvType = "f16",
    index_type: IndexType = "f32",
    index_scan: IndexScan = "auto",
    exact: Exact = False,
    isa: Isa = "auto",
    no_mmap: NoMmap = False,
    version: Version = False,
) -> int:
    sampling = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repeat_penalty": repeat_penalty,
    }
    text = _prompt_text(prompt, file, raw)
    if text is None:
        _refuse("needs a prompt: -p or -f", {"--json": as_json and not plan, "--raw": raw})
    if raw:
        needs = "needs the chat template, which --raw leaves out"
        _refuse(needs, {"--system": system is not None, "--thinking": thinking is not None})
    if on_full is OnFull.STOP:
        _refuse("needs --on-full shift", {"--keep": keep is not None})
    if text is not None:
        _refuse("is for the chat, without -p and -f", {"--plain": plain})
    if require_sparse and attention == "dense":
        raise InputError("--require-sparse: the run would be dense, because of --attention dense")
    # Here, so that an engine that cannot be loaded is an error of the command like any other.
    from m3_runtime.run import RunOptions, run_model

    options = RunOptions(
        model=model,
        prompt=text,
        max_tokens=max_tokens,
        context=context,
        device=device,
        isa=isa,
        threads=threads,
        as_json=as_json,
        system=system,
        raw=raw,
        thinking=thinking and thinking.value,
        on_full=on_full,
        keep=keep or 0,
        plain=plain,
        sampling={name: value for name, value in sampling.items() if value is not None},
        seed=seed,
        attention=attention,
        require_sparse=require_sparse,
        kv_type=kv_type,
        index_type=index_type,
        index_scan=index_scan,
        exact=exact,
        mmap=not no_mmap,
        experts_on=experts_on,
        plan_only=plan,
    )
    return run_model(options)


def _prompt_text(prompt: str | None, file: str | None, raw: bool) -> str | None:
    """The prompt of -p or -f, None for a chat."""
    if prompt is not None:
        if file is not None:
            raise InputError("-p and -f are both given, expected one of them")
        return _not_empty(_decode(os.fsencode(prompt), "-p"), "-p")
    if file is None:
        return None
    if not file:
        raise InputError("-f is empty, expected the name of a file, or - for standard input")
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise InputError(f"-f {file}: {error.strerror}") from None
    text = _decode(data, f"-f {file}")
    return _not_empty(text if raw else text.removesuffix("\n").removesuffix("\r"), f"-f {file}")


def _not_empty(text: str, what: str) -> str:
    """A model answers nothing too, and a script whose first half failed would not notice."""
    if not text:
        raise InputError(f"{what}: the prompt is empty")
    return text


def _decode(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{what}: {invalid_utf8(error)}") from None


def _refuse(why: str, given: dict[str, bool]) -> None:
    """Options that would else be left out without a word."""
    for option, is_given in given.items():
        if is_given:
            raise InputError(f"{option} {why}")


def main() -> NoReturn:
    """Entry point of m3-run."""
    run(app, NAME)


if __name__ == "__main__":
    main()
