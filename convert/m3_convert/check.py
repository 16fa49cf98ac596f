"""A check of a candidate against its reference, from two names to what is to be reported."""

import hashlib
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from m3_convert.check_report import CheckReport, GroupSummary, SideSummary, differences
from m3_convert.check_runs import CheckRuns
from m3_convert.check_walk import CheckResult, walk
from m3_convert.comparable import check_choice, check_comparable
from m3_convert.journal import library_hash
from m3_convert.layered_model import FilesChangedError, LayeredModel, open_layered, unchanged
from m3_convert.mixed_model import MixedModel, group_tensors, same_group
from m3_convert.model_hash import hash_of, start_hash
from m3_convert.tensor_group import GROUPS
from m3_convert.text_sample import Text, context_tokens, load_text, sample_text
from m3_convert.token_text import TokenText
from m3_convert.verdict import Thresholds
from m3_convert.walk_progress import walk_progress
from m3_convert.walk_state import WalkState, basis_hash, default_folder, prepare_folder, state_folder
from m3_convert.walker import WalkOptions, check_memory
from m3_runtime import memory
from m3_runtime.command import tell
from m3_runtime.errors import InputError
from m3_runtime.native import version
from m3_runtime.quantities import format_bytes

NAME: Final = "m3-check-selection"


@dataclass(frozen=True)
class Check:
    """What is to be checked, and how."""

    reference: Path
    candidate: Path
    text: Path | None = None  #: None: the text that ships with the package
    context: int | None = None  #: tokens, see `context_tokens`
    reference_options: WalkOptions = field(default_factory=WalkOptions)
    candidate_options: WalkOptions = field(default_factory=WalkOptions)
    thresholds: Thresholds = field(default_factory=Thresholds)
    logits: bool = True
    isolate: bool = False
    attribute: bool = False
    groups: tuple[str, ...] = ()  #: to restore one at a time, all if empty
    state: Path | None = None  #: folder of states, None: `default_folder`
    restart: bool = False
    device: str = "cpu"
    isa: str = "auto"

    def __post_init__(self) -> None:
        """Raises InputError for options that do not go together."""
        if self.groups and not self.attribute:
            raise InputError("--group is for --attribute, which is not given")
        if not self.logits and self.thresholds.max_kld is not None:
            raise InputError("--max-kld judges the logits, which --selection-only leaves out")
        if self.candidate_options.selects:
            return
        for option, given in (
            ("--min-overlap", self.thresholds.min_overlap is not None),
            ("--max-mass-lost", self.thresholds.max_mass_lost is not None),
            ("--isolate", self.isolate),
            ("--attribute", self.attribute),
            ("--selection-only", not self.logits),
        ):
            if given:
                raise InputError(f"{option} is about the selection, and --candidate-attention dense selects nothing")


def _kernels(side: LayeredModel) -> str:
    """What computed: the instruction set, or the GPU."""
    model = side.model
    return model.isa_name if model.backend_name == "cpu" else f"{model.backend_name} {model.device_name}"


@contextmanager
def run_check(check: Check) -> Iterator[CheckReport]:
    """The result of a check, for a block that writes it out. Tells on stderr what it does.

    The state of an interrupted check is removed when the block is done: if it raises, the same command goes on.
    Raises InputError and NotFiniteError naming what is wrong with models, text or options, NothingTestedError if no
    query has a choice of blocks, MachineError if memory is missing.
    """
    report, state = _report(check, _states(check))
    with _resumable(state, report.hparams.n_layer, BaseException):
        yield report
    state.remove()


def _report(check: Check, states: Path | None) -> tuple[CheckReport, WalkState]:
    start = time.monotonic()
    source = load_text(check.text)
    with ExitStack() as stack:
        ours, theirs = _open_both(check, stack)
        tokenizer = ours.tokenizer()
        trained = min(side.hparams.context_train for side in (ours, theirs))
        sample = sample_text(source, tokenizer, context_tokens(check.context, trained))
        check_choice(ours.hparams, len(sample.ids))
        same, groups = _groups(check, ours, theirs, stack)
        runs = CheckRuns(
            reference=ours,
            candidate=theirs,
            reference_options=check.reference_options,
            candidate_options=check.candidate_options,
            logits=check.logits,
            isolated=check.isolate,
            groups=groups,
        )
        estimated = _estimate(runs, len(sample.ids))
        digests = {side.origin.described_by: start_hash(side) for side in (ours, theirs)}  # one for the same files
        ids = np.array(sample.ids, np.int32)
        folder = None if states is None else state_folder(states, _question(check, runs, source))
        state = WalkState(folder, basis_hash(_basis(runs, ids)), note)
        try:
            with unchanged(ours, theirs):
                result = _walk(runs, ids, state, restart=check.restart)
                if not all(digest.done() for digest in digests.values()):
                    note("the files are still being read for their hash")
                reference, candidate = (
                    _summary(side, digests[side.origin.described_by].result()) for side in (ours, theirs)
                )
        except FilesChangedError:
            state.remove()
            raise
        report = CheckReport(
            result=result,
            reference=reference,
            candidate=candidate,
            differences=differences(runs, result.deviations),
            groups=[GroupSummary.of(model) for model in groups] if check.attribute else None,
            same_groups=same,
            hparams=ours.hparams,
            sample=sample,
            text=TokenText(tokenizer, sample.ids, ours.hparams.block_size),
            wanted_tokens=check.context,
            reference_options=check.reference_options,
            candidate_options=check.candidate_options,
            isa=_kernels(ours),
            thresholds=check.thresholds,
            program=version(),
            versions=_versions(),
            estimated_bytes=estimated,
            peak_bytes=memory.peak_resident_bytes(),
            seconds=time.monotonic() - start,
        )
    return report, state


def _open_both(check: Check, stack: ExitStack) -> tuple[LayeredModel, LayeredModel]:
    """Reference and candidate, which can be compared."""
    threads = check.reference_options.threads
    ours, theirs = (
        stack.enter_context(open_layered(path, device=check.device, isa=check.isa, threads=threads))
        for path in (check.reference, check.candidate)
    )
    for text in dict.fromkeys((*ours.notes, *theirs.notes)):
        note(f"note: {text}")
    check_comparable(ours, theirs)
    return ours, theirs


def _versions() -> dict[str, str]:
    """What the numbers come from, besides this program."""
    packages = {name: package_version(name) for name in ("numpy", "tokenizers")}
    return {"engine_sha256": library_hash(), "python": platform.python_version(), **packages}


def _summary(side: LayeredModel, sha256: str) -> SideSummary:
    return SideSummary(side.name, side.kind, side.n_bytes, side.types(), sha256, hash_of(side))


def note(text: str) -> None:
    """A line for people."""
    tell(NAME, text)


def _groups(
    check: Check, ours: LayeredModel, theirs: LayeredModel, stack: ExitStack
) -> tuple[list[str], list[MixedModel]]:
    """The groups that are the same on both sides, and the candidate with each of the others restored."""
    same: list[str] = []
    models: list[MixedModel] = []
    if not check.attribute:
        return same, models
    for group in dict.fromkeys(check.groups or GROUPS):
        if not group_tensors(theirs, group):
            if check.groups:
                raise InputError(f"--group {group}: {theirs.name} has no such tensors")
            continue
        if same_group(ours, theirs, group):
            same.append(group)
        else:
            models.append(stack.enter_context(MixedModel(theirs, ours, group)))
    return same, models


def _estimate(runs: CheckRuns, n_tokens: int) -> int:
    """Prints and returns the memory that the process will have at its peak; MachineError if it is not there."""
    estimate = runs.memory(n_tokens)
    total = memory.peak_resident_bytes() + estimate.total
    room = memory.session_room()
    free = "" if room is None else f", {format_bytes(room)} are free"
    note(f"{n_tokens} tokens take about {format_bytes(total)} of memory at the peak{free}")
    check_memory(estimate, room, "the check", "a smaller --context takes less")
    return total


# ------------------------------------------------------------------------------------------------ the walk


def _walk(runs: CheckRuns, ids: npt.NDArray[np.int32], state: WalkState, *, restart: bool) -> CheckResult:
    n_layer = runs.hparams.n_layer
    if restart:
        state.remove()
    state.load()
    if state.layer:
        note(f"going on after layer {state.layer} of {n_layer}, where an earlier run was (--restart starts anew)")
    stages = runs.stages(len(ids))
    done = sum(work for _, work in stages[: state.layer])
    stopped = _resumable(state, n_layer, KeyboardInterrupt, SystemExit)
    with stopped, walk_progress(NAME, stages, sys.stderr, done) as advance:
        return walk(runs, ids, state, advance)


@contextmanager
def _resumable(state: WalkState, n_layer: int, *errors: type[BaseException]) -> Iterator[None]:
    """Says where a check goes on that ends with one of these errors."""
    try:
        yield
    except errors:
        if state.layer:
            note(f"the same command goes on after layer {state.layer} of {n_layer}; the state is in {state.folder}")
        elif state.folder is not None:
            note("nothing had been saved yet (it is once a minute): the same command starts anew")
        raise


def _states(check: Check) -> Path | None:
    """The folder that holds those of the checks, None if there is none.

    Raises InputError for a --state in which nothing can be written: a check may take hours until it would notice.
    """
    try:
        parent = check.state or default_folder()
    except RuntimeError:  # from pathlib: nobody knows a home directory
        note("note: there is no home directory, so that an interrupted check starts anew; --state names a folder")
        return None
    try:
        prepare_folder(parent)
    except OSError as error:
        if check.state is not None:
            raise InputError(f"--state {parent}: nothing can be written there: {error.strerror}") from error
        note(
            f"note: {parent}: nothing can be written there ({error.strerror}), so that an interrupted check starts "
            "anew; --state names another folder"
        )
        return None
    return parent


def _question(check: Check, runs: CheckRuns, text: Text) -> dict[str, Any]:
    """What is asked for, by name, values of JSON."""
    options = [asdict(runs.reference_options), asdict(runs.candidate_options)]
    for side in options:
        del side["threads"]  # change nothing
    # A folder or file by its place, an id on the Hub as it is.
    sides = [str(path.absolute() if path.exists() else path) for path in (check.reference, check.candidate)]
    text_name = str(check.text.absolute()) if check.text and check.text.is_file() else text.name
    return {
        "sides": sides,
        "text": [text_name, check.context],
        "kernels": _kernels(runs.reference),
        "options": options,
        "runs": [runs.logits, runs.isolated, check.attribute and list(check.groups)],
    }


def _basis(runs: CheckRuns, ids: npt.NDArray[np.int32]) -> dict[str, Any]:
    """What its result depends on besides, values of JSON."""
    return {
        "program": [version(), library_hash()],
        "sides": [dict(side.origin.identity) for side in (runs.reference, runs.candidate)],
        "ids": hashlib.sha256(ids.tobytes()).hexdigest(),
        "groups": [model.group for model in runs.groups],
    }
