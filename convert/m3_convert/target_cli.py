"""m3-convert with --target-overlap or --max-size: a search in place of a fixed recipe."""

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from m3_convert.comparable import check_choice
from m3_convert.execute import check_outputs, hold_output
from m3_convert.gguf_file import OutputFile, header_bytes
from m3_convert.imatrix import ImportanceMatrix
from m3_convert.imatrix_collect import collect, default_context, estimate_memory, expert_reach, few_tokens, work
from m3_convert.journal import library_hash
from m3_convert.layered_model import LayeredModel, open_layered
from m3_convert.metadata import plan_metadata
from m3_convert.notation import exact, share
from m3_convert.output_path import check_output as check_small_output
from m3_convert.output_path import imatrix_path, recipe_path
from m3_convert.plan import Plan, plan_conversion
from m3_convert.precision import TypeChoice, choose
from m3_convert.recipe import recipe_names
from m3_convert.source import Source, open_source
from m3_convert.stored_name import stored_name
from m3_convert.target_report import print_found, target_json
from m3_convert.target_search import Found, Search, Target
from m3_convert.text_sample import Text, context_tokens, load_text, sample_text
from m3_convert.trial import Trials
from m3_convert.trial_check import Checks
from m3_convert.walk_progress import layer_stages, walk_progress
from m3_convert.walk_state import default_folder, prepare_folder, state_folder
from m3_convert.walker import WalkOptions, check_memory
from m3_convert.whole_file import write_whole
from m3_runtime import memory
from m3_runtime.command import one_line, tell
from m3_runtime.errors import ExitCode, InputError, MachineError
from m3_runtime.native import version
from m3_runtime.quantities import format_bytes
from m3_runtime.text import ChatTokenizer

NAME: Final = "m3-convert"
#: Tokens of the text that the importance matrix is collected over, at most; m3-imatrix takes all.
IMATRIX_TOKENS: Final = 1 << 16


@dataclass(frozen=True)
class TargetRequest:
    """What the user asked for. base: the choice of types that the search begins with, None: the largest recipe that
    fits."""

    source: str
    out: Path
    target: Target
    base: TypeChoice
    text: Path
    recipe: Path | None = None
    imatrix: Path | None = None
    context: int | None = None  #: tokens of the text that are read for a check
    state: Path | None = None
    accept_best: bool = False  #: write the best file even if the target is missed
    restart: bool = False
    threads: int = 0
    as_json: bool = False

    @property
    def named(self) -> bool:
        """False if no recipe and no type was named."""
        return self.base.recipe is not None or self.base.default is not None


def parse_overlap(value: float | None) -> float | None:
    """Raises InputError for a number that is no overlap."""
    if value is not None and not 0 <= value <= 1:  # NaN is neither
        raise InputError(f"--target-overlap is {exact(value)}, expected 0 to 1")
    return value


def search_target(request: TargetRequest) -> int:
    """Searches, writes file, recipe and importance matrix, and reports. Returns the exit code.

    Raises InputError naming what is wrong with source, text or options, NothingTestedError for a text that is too
    short, MachineError for missing memory or disk.
    """
    start = time.monotonic()
    if request.target.max_bytes is None and not request.named:
        raise InputError("--target-overlap raises precision above that of a recipe: name it with --type or --recipe")
    source = open_source(request.source)
    text = load_text(request.text)
    base = _base(source, request)
    out, _ = check_outputs(base, [OutputFile(request.out, b"", ())], request.out)
    inputs = [Path(request.source), request.text, *base.inputs]
    targets = [recipe_path(out), *([] if request.imatrix else [imatrix_path(out)])]
    for path in targets:
        check_small_output(path, "the recipe" if path.suffix == ".toml" else "the importance matrix", inputs)
        stored_name(path, "file")
    options = WalkOptions(threads=request.threads)
    with hold_output(out), open_layered(Path(request.source), threads=request.threads) as reference:
        for line in dict.fromkeys((*reference.notes, *base.warnings)):
            _note(f"note: {line}")
        tokenizer = reference.tokenizer()
        ids = _ids(text, tokenizer, context_tokens(request.context, reference.hparams.context_train), reference)
        given = None if request.imatrix is None else ImportanceMatrix.load(request.imatrix)
        folder = _folder(request, reference, text, ids, given)
        if request.imatrix and (other := imatrix_path(out)).exists() and not other.samefile(request.imatrix):
            _note(f"note: {other} is there already; it is not the importance matrix of this file")
        trials = Trials(source, base.choice, out, folder, request.threads, base.inputs)
        with _resumable(trials):
            if request.restart:
                trials.forget()
            matrix = given or _importance(reference, text, tokenizer, options, folder, imatrix_path(out))
            trials = replace(trials, importance=matrix)
            search = Search(
                target=request.target,
                base=base,
                fixed=_fixed(base),
                trials=trials,
                checks=Checks(NAME, reference, ids, options, folder, _note),
                matrix=matrix,
                threads=request.threads,
                about=_about(request, base, text, len(ids)),
                note=_note,
            )
            found = search.run()
            written = found.met or request.accept_best
            if written:
                _write(found, trials, None if given else matrix)
            else:
                trials.remove()
    seconds = time.monotonic() - start
    report = target_json(request.target, found, base.choice.name, out if written else None, seconds)
    if request.as_json:
        print(json.dumps(report, indent=2))
    else:
        print_found(report, sys.stdout)
    if not found.met:
        worst = found.best.outcome.worst
        kept = "" if written else "; nothing was written, --accept-best takes it as it is"
        how = "cannot be reached: the best possible" if found.exhausted else "was not reached: the best"
        _note(
            f"{request.target} {how} file has {share(worst.overlap)} in layer {worst.layer}, head {worst.head}, with "
            f"{format_bytes(found.best.n_bytes)}{kept}"
        )
        return ExitCode.FELL_SHORT
    return ExitCode.OK


def _note(text: str) -> None:
    tell(NAME, text)


# ------------------------------------------------------------------------------------------------ what it begins with


def _base(source: Source, request: TargetRequest) -> Plan:
    """The plan of the recipe that was named, or of the largest one that is small enough."""
    inputs = tuple(path for path in (request.recipe, request.imatrix, request.text) if path is not None)
    if request.named:
        return replace(plan_conversion(source, request.base), inputs=inputs)
    plans = []
    for name in recipe_names():
        recipe = choose(name).recipe
        plans.append(replace(plan_conversion(source, replace(request.base, recipe=recipe)), inputs=inputs))
    plans.sort(key=lambda plan: plan.data_bytes)
    assert request.target.max_bytes is not None
    room = request.target.max_bytes - len(header_bytes(plans[0], plan_metadata(plans[0])[0]))
    fitting = [plan for plan in plans if plan.data_bytes <= room]
    return (fitting or plans[:1])[-1]


def _fixed(plan: Plan) -> frozenset[str]:
    """Tensors that a --rule decides."""
    rules = plan.choice.rules
    return frozenset(t.name for t in plan.tensors if any(t.reason == rule.reason for rule in rules))


def _ids(text: Text, tokenizer: ChatTokenizer, n: int, reference: LayeredModel) -> npt.NDArray[np.int32]:
    sample = sample_text(text, tokenizer, n)
    check_choice(reference.hparams, len(sample.ids))
    return np.array(sample.ids, np.int32)


def _about(request: TargetRequest, base: Plan, text: Text, n_tokens: int) -> Sequence[str]:
    lines = (
        f"Found by m3-convert {version()} for {request.target}, beginning with {base.choice.name}.",
        f"Text: {Path(text.name).name}, {n_tokens:,} tokens, sha256 {text.sha256}.",
        "Bytes are of the tensors of a line, beside those that they had before. What a line changes was predicted from",
        "runs in which groups of tensors were restored, and from the error of each tensor with each type.",
    )
    return [one_line(line) for line in lines]  # names of files may hold anything


# ------------------------------------------------------------------------------------------------ the state


def _folder(
    request: TargetRequest,
    reference: LayeredModel,
    text: Text,
    ids: npt.NDArray[np.int32],
    given: ImportanceMatrix | None,
) -> Path:
    """The folder of all searches over this text and source."""
    try:
        parent = request.state or default_folder()
        prepare_folder(parent)
    except (RuntimeError, OSError) as error:  # RuntimeError, from pathlib: nobody knows a home directory
        why = f"{parent}: {error.strerror}" if isinstance(error, OSError) else "there is no home directory"
        raise InputError(f"a search needs a folder for what it finds: {why}; --state names one") from error
    basis = {
        "search": [version(), library_hash(), reference.model.isa_name],
        "source": dict(reference.origin.identity),
        "ids": hashlib.sha256(ids.tobytes()).hexdigest(),
        "text": text.sha256,
        "importance": given.sha256 if given else None,
    }
    folder = state_folder(parent, basis)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _resumable(trials: Trials) -> Iterator[None]:
    """Says what stays if the search ends before its time, for a reason that may be gone the next time."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MachineError):
        left = " and ".join(map(str, trials.left()))
        kept = f", the file to be checked in {left}" if left else ""
        _note(
            f"the same command goes on from here (--restart starts anew): what was measured is in {trials.folder}{kept}"
        )
        raise


def _importance(
    reference: LayeredModel, text: Text, tokenizer: ChatTokenizer, options: WalkOptions, folder: Path, path: Path
) -> ImportanceMatrix:
    """The matrix of the text, with the name that its file gets."""
    stored = folder / "imatrix.gguf"
    if not stored.exists():
        ids = np.array(sample_text(text, tokenizer, IMATRIX_TOKENS).ids, np.int32)
        context = default_context(reference.hparams)
        estimate = estimate_memory(reference, len(ids), context, options)
        check_memory(estimate, memory.session_room(), "collecting importance", "m3-imatrix does it apart")
        stages = layer_stages(reference.hparams.n_layer, work(reference, len(ids)))
        with walk_progress(f"{NAME}: importance", stages, sys.stderr) as advance:
            entries = collect(reference, ids, context, options, advance)
        if few := few_tokens(len(ids), reference.hparams, expert_reach(entries)):
            _note(few)
        name = Path(text.name).name
        ImportanceMatrix(str(path), entries, (name,), -(-len(ids) // context), context).save(stored)
    return replace(ImportanceMatrix.load(stored), name=str(path))


def _write(found: Found, trials: Trials, matrix: ImportanceMatrix | None) -> None:
    """The file comes last: who sees it sees all."""
    trials.make(found.best.recipe)
    write_whole(recipe_path(trials.out), found.best.recipe.text.encode())
    if matrix is not None:
        matrix.save(imatrix_path(trials.out))
    trials.give_name()
