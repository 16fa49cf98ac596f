"""One run of m3-run: a model, a memory plan, a session, and then an answer or a chat."""

import json
import sys
import time
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from m3_runtime import memory
from m3_runtime.chat import ChatFormat, Conversation, first_messages
from m3_runtime.chat_commands import FILE_NAMES, NAMES, ChatCommands
from m3_runtime.chat_loop import ChatLoop
from m3_runtime.choices import OnFull
from m3_runtime.command import one_line
from m3_runtime.engine import Model, Session, SessionOptions
from m3_runtime.errors import ContextError, ExitCode, InputError
from m3_runtime.file_identity import unchanged_files
from m3_runtime.generate import Answer, FinishReason, Generator, Prompt
from m3_runtime.gguf_reader import gguf_files
from m3_runtime.held_tokens import Shift
from m3_runtime.line_reader import EditingReader, new_reader
from m3_runtime.native import default_threads, version
from m3_runtime.placement import Plan
from m3_runtime.quantities import format_bytes
from m3_runtime.reply import opens_thinking
from m3_runtime.sampler import Sampler, SamplerOptions, new_seed
from m3_runtime.saved_chat import ChatFiles
from m3_runtime.screen import LoadProgress, MarkdownScreen, PrefillProgress, Screen, is_capable
from m3_runtime.template import ChatTemplate
from m3_runtime.text import ChatTokenizer

DENSE_WARNING = (
    "warning: --attention dense: the sparse layers read every token, which the model was not trained for "
    "(out of distribution)"
)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What the command line asks for; None where it does not say."""

    model: Path
    prompt: str | None  #: None for a chat
    max_tokens: int | None
    context: int | None
    device: str
    isa: str
    threads: int
    as_json: bool
    system: str | None
    raw: bool
    thinking: str | None
    on_full: OnFull
    keep: int  #: tokens at the start that a shift leaves alone, at least
    plain: bool  #: no Markdown
    sampling: dict[str, float]  #: fields of SamplerOptions that were given
    seed: int | None
    attention: str  #: "sparse" or "dense"
    require_sparse: bool
    kv_type: str
    index_type: str
    index_scan: str
    exact: bool
    mmap: bool  #: as for `Model`
    experts_on: str  #: as for `Model`
    plan_only: bool  #: show the plan and do nothing else


def run_model(options: RunOptions) -> ExitCode:
    """Opens the model and does what the options ask for: the command without its command line."""
    start = time.perf_counter()
    if options.model.is_dir() and not gguf_files(options.model):
        raise InputError(
            f"{options.model}: is a folder; m3-run reads a GGUF file, which m3-convert makes of a checkpoint"
        )
    memory.check_file_maps(options.model)
    with (
        Model(
            options.model, device=options.device, isa=options.isa, mmap=options.mmap, experts_on=options.experts_on
        ) as model,
        unchanged_files(model.gguf.files),
    ):
        return Run(options, model, start).execute()


class Run:
    """One run with an open model."""

    def __init__(self, options: RunOptions, model: Model, start: float) -> None:
        """start: `time.perf_counter` when loading began."""
        self._options = options
        self._model = model
        h = model.hparams
        if options.require_sparse and h.n_dense_layer >= h.n_layer:
            raise InputError(f"--require-sparse: {model.path} has no sparse layer")
        metadata = model.gguf.metadata
        self._tokenizer = ChatTokenizer(metadata)
        self._format: ChatFormat | None = None
        if not options.raw:
            template = ChatTemplate.from_metadata(metadata)
            self._format = ChatFormat(template, self._tokenizer, options.thinking)
        self._sampling = replace(SamplerOptions.from_metadata(metadata), **options.sampling)  # type: ignore[arg-type]
        self._seed = new_seed() if options.seed is None else options.seed
        self._threads = options.threads or default_threads()
        self._load_seconds = time.perf_counter() - start

    def execute(self) -> ExitCode:
        """Answers the prompt, or chats if there is none."""
        text = self._options.prompt
        prompt = None if text is None else self._prompt(text)
        if prompt and not prompt.ids:
            raise InputError("the prompt has no tokens, expected at least one")
        context = self._context(len(prompt.ids) if prompt else 0)
        session_options = self._session_options(context)
        plan = self._model.plan(**session_options)
        if self._options.plan_only:
            return self._show_plan(context, plan)
        plan.check(context, self._room())
        self._say_status(context, plan)
        self._model.place(**session_options)
        self._load()
        unused = [*self._tokenizer.unused_ids(), *range(len(self._tokenizer), self._model.hparams.n_vocab)]
        sampler = Sampler(self._sampling, self._seed, banned=unused)
        with self._model.session(**session_options) as session:
            generator = Generator(session, context, self._tokenizer, sampler, shift=self._shift(context))
            if prompt is None:
                return self._chat(session, generator, context, plan)
            return self._answer(generator, prompt, context, plan)

    def _shift(self, context: int) -> Shift | None:
        """The policy for a full context. Raises InputError if it could never drop anything."""
        options, size = self._options, self._model.hparams.block_size
        if options.on_full is OnFull.STOP:
            return None
        system = 0
        if self._format is not None:
            system = len(self._format.up_to_message(first_messages(options.system)))
        shift = Shift(size, max(system, options.keep))
        if shift.pinned_tokens + 2 * size > context:
            raise InputError(
                f"--on-full shift: {shift.pinned_tokens} tokens are pinned (system message {system}, --keep "
                f"{options.keep}, blocks of {size}), expected at most {context - 2 * size} of the context's {context}"
            )
        return shift

    def _prompt(self, text: str) -> Prompt:
        if self._format is None:
            return Prompt(self._tokenizer.encode(text), opens_thinking(text))
        return self._format.prompt([*first_messages(self._options.system), {"role": "user", "content": text}])

    def _context(self, n_prompt: int) -> int:
        """Tokens of the session. Raises ContextError if the prompt cannot fit."""
        trained, given = self._model.hparams.context_train, self._options.context
        if given is not None and given > trained:
            raise InputError(f"--context {given}: the file's context is {trained}")
        limit = trained if given is None else given
        if n_prompt > limit:
            whose = "the file's context" if given is None else "--context"
            raise ContextError(f"the prompt has {n_prompt} tokens, {whose} holds {limit}")
        if given is not None:
            return given
        needed = n_prompt + (self._options.max_tokens or memory.DEFAULT_ANSWER) if n_prompt else 0

        def session_bytes(context: int) -> int:
            return self._model.memory(**self._session_options(context)).total

        least = self._model.plan(**self._session_options(1))
        room = least.session_room(self._room(), all_experts=self._options.experts_on == "gpu")
        return memory.default_context(trained, needed, session_bytes, room)

    def _room(self) -> int | None:
        """Bytes of the machine's memory that are left. None if that is unknown."""
        return memory.session_room(0 if self._options.mmap else self._model.weight_bytes)

    def _show_plan(self, context: int, plan: Plan) -> ExitCode:
        """The plan as the result. MachineError behind it if it does not fit."""
        if self._options.as_json:
            report = {"file": self._model.path, "context": context, "device_name": self._model.device_name}
            print(json.dumps(report | {"plan": plan.as_json()}, indent=2), flush=True)
        else:
            print("\n".join(plan.table()), flush=True)
        plan.check(context, self._room())
        self._say_status(context, plan, table=False)
        return ExitCode.OK

    def _load(self) -> None:
        progress = LoadProgress(sys.stderr)
        start = time.perf_counter()
        try:
            self._model.load(progress=progress)
        finally:
            progress.clear()
        self._load_seconds += time.perf_counter() - start

    def _session_options(self, context: int) -> SessionOptions:
        options = self._options
        return {
            "context": context,
            "sequences": 1,
            "kv_type": options.kv_type,
            "index_type": options.index_type,
            "index_scan": options.index_scan,
            "attention": options.attention,
            "exact": options.exact,
            "threads": options.threads,
        }

    # ------------------------------------------------------------------------------------------------ status

    def _attention(self) -> str:
        h = self._model.hparams
        if self._options.attention == "dense":
            return "dense"
        return f"sparse (top {h.top_k} of blocks of {h.block_size})"

    def _status(self, context: int, plan: Plan) -> str:
        options, size = self._options, format_bytes
        types = ", ".join(f"{name} {size(n_bytes)}" for name, n_bytes in self._model.bytes_by_type.items())
        return (
            f"{self._model.path}: {types}; attention {self._attention()}; context {context}; "
            f"K/V {options.kv_type} {size(plan.kv_bytes)}, index keys {options.index_type} {size(plan.index_bytes)}, "
            f"scratch {size(plan.scratch_bytes)}; {self._device()}{self._msa(context)}; seed {self._seed}"
        )

    def _device(self) -> str:
        name = f"{self._model.backend_name} {self._model.device_name}"
        device = self._model.device_memory()
        if device is None:
            return f"{name}, {self._threads} threads"
        return f"{name}, {format_bytes(device[0])} of {format_bytes(device[1])} free"

    def _msa(self, context: int) -> str:
        """Which kernels a GPU selects and attends with: whoever waits for the plain ones sees why."""
        way = self._model.msa(**self._session_options(context))
        return f", msa {way}" if way else ""

    def _say_status(self, context: int, plan: Plan, *, table: bool = True) -> None:
        options = self._options
        _say(self._status(context, plan))
        for line in plan.table() if table else ():
            print(f"m3-run: {line}", file=sys.stderr, flush=True)
        if options.attention == "dense":
            _say(DENSE_WARNING)
        free = memory.available_memory()
        if free is None or not options.mmap:
            return
        if plan.free_bytes is None and plan.device_bytes > free:
            _say(
                f"note: weights and session take {format_bytes(plan.device_bytes)}, {format_bytes(free)} are free: "
                "weights will be read from the disk again and again"
            )
        elif plan.cpu_experts_bytes + plan.host_bytes > free:
            _say(
                f"note: experts on the CPU take {format_bytes(plan.cpu_experts_bytes + plan.host_bytes)}, "
                f"{format_bytes(free)} are free: they will be read from the disk again and again"
            )

    # ------------------------------------------------------------------------------------------------ the work

    def _chat(self, session: Session, generator: Generator, context: int, plan: Plan) -> ExitCode:
        assert self._format is not None
        options = self._options
        conversation = Conversation(
            self._format, generator, system=options.system, max_tokens=options.max_tokens, keep=options.keep
        )
        reader = new_reader(sys.stdout, sys.stderr, NAMES, FILE_NAMES)
        if reader.interactive:
            _say("chat; /help lists the commands")
        if isinstance(reader, EditingReader) and reader.warning:
            _say(reader.warning)
        markdown = is_capable(sys.stdout) and not options.plain
        screen = (MarkdownScreen if markdown else Screen)(sys.stdout, sys.stderr)
        files = ChatFiles(session, generator.held, sys.stderr)
        commands = ChatCommands(conversation, screen, self._tokenizer, files, sys.stderr, self._status(context, plan))
        return ChatLoop(conversation, screen, reader, commands, sys.stderr).run()

    def _answer(self, generator: Generator, prompt: Prompt, context: int, plan: Plan) -> ExitCode:
        answer = Answer()
        screen = None if self._options.as_json else Screen(sys.stdout, sys.stderr)
        progress = PrefillProgress(sys.stderr, len(prompt.ids))
        pieces = generator.answer(prompt, answer, max_tokens=self._options.max_tokens, progress=progress)
        try:
            with closing(pieces):
                for piece in pieces:
                    progress.clear()
                    if screen:
                        screen.show(piece)
        except KeyboardInterrupt:
            answer.finish = FinishReason.INTERRUPTED
        finally:
            progress.clear()
            if screen:
                screen.end()
        if self._options.as_json:
            report = self._report(answer, prompt, context, plan, len(generator.held.dropped))
            print(json.dumps(report, indent=2))
        if answer.finish is FinishReason.INTERRUPTED:
            return ExitCode.INTERRUPTED
        if answer.finish is FinishReason.CONTEXT:
            _say(f"context full: {generator.used}/{context} tokens, the answer is cut")
        if dropped := len(generator.held.dropped):
            _say(f"context full: dropped {dropped} tokens behind the first {generator.held.pinned}")
        return ExitCode.OK

    def _report(self, answer: Answer, prompt: Prompt, context: int, plan: Plan, dropped: int) -> dict[str, Any]:
        h, options, timings = self._model.hparams, self._options, answer.timings
        calls = answer.reply.tool_calls()
        return {
            "answer": answer.reply.text,
            "thinking": answer.reply.thinking,
            "tool_calls": [asdict(call) for call in calls.calls],
            "broken_tool_calls": [asdict(call) for call in calls.broken],
            "finish_reason": answer.finish.value if answer.finish else None,
            "attention": options.attention,
            "top_k_blocks": h.top_k,
            "block_size": h.block_size,
            "tokens": {"prompt": len(prompt.ids), "answer": len(answer.ids), "context": context, "dropped": dropped},
            "timings": {
                "load_s": round(self._load_seconds, 4),
                "prefill_tokens": timings.prefill_tokens,
                "prefill_s": round(timings.prefill_seconds, 4),
                "prefill_tokens_per_s": _rounded(timings.prefill_rate),
                "decode_tokens": timings.decode_evals,
                "decode_s": round(timings.decode_seconds, 4),
                "decode_tokens_per_s": _rounded(timings.decode_rate),
            },
            "memory": {
                "weights_bytes": self._model.weight_bytes,
                "kv_bytes": plan.kv_bytes,
                "index_bytes": plan.index_bytes,
                "scratch_bytes": plan.scratch_bytes,
                "peak_rss_bytes": memory.peak_resident_bytes(),
            },
            "plan": plan.as_json(),
            "sampling": asdict(self._sampling),
            "seed": self._seed,
            "model": str(self._model.gguf.metadata.get("general.name", "")),
            "file": self._model.path,
            "weight_types": self._model.bytes_by_type,
            "slow": self._model.slow_types,
            "mmap": options.mmap,
            "kv_type": options.kv_type,
            "index_type": options.index_type,
            "device": self._model.backend_name,
            "device_name": self._model.device_name,
            "msa": self._model.msa(**self._session_options(context)) or None,
            "isa": self._model.isa_name,
            "threads": self._threads,
            "version": version(),
        }


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 2)


def _say(text: str) -> None:
    """One line of status on stderr."""
    print(f"m3-run: {one_line(text)}", file=sys.stderr, flush=True)
