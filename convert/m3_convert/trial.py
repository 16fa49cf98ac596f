"""The file that a search makes to be checked: OUT.gguf.trial, one at a time, which in the end becomes OUT."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from m3_convert.execute import convert
from m3_convert.gguf_file import OutputFile, check_header, header_bytes
from m3_convert.imatrix import ImportanceMatrix
from m3_convert.journal import journal_path
from m3_convert.metadata import plan_metadata
from m3_convert.output_path import part_path, recipe_path
from m3_convert.plan import Plan, plan_conversion
from m3_convert.precision import TypeChoice
from m3_convert.recipe import Recipe, parse_recipe
from m3_convert.source import Source
from m3_convert.whole_file import write_whole
from m3_runtime.errors import InputError
from m3_runtime.quantize import TensorType

TRIAL_SUFFIX = ".trial"


@dataclass(frozen=True)
class Trials:
    """Makes files of recipes. choice: its leaves are taken over. folder: of the search; a note beside it says what the
    trial is, so that another search may replace it."""

    source: Source
    choice: TypeChoice
    out: Path  #: what the last one becomes
    folder: Path
    threads: int
    inputs: tuple[Path, ...]  #: files that no output may replace
    importance: ImportanceMatrix | None = None

    @property
    def path(self) -> Path:
        return self.out.with_name(self.out.name + TRIAL_SUFFIX)

    def recipe(self, text: str) -> Recipe:
        """The recipe with the name that its file gets."""
        return parse_recipe(text.encode(), recipe_path(self.out).stem)

    def plan(self, recipe: Recipe) -> Plan:
        """Raises InputError as a conversion with this recipe would."""
        plan = plan_conversion(self.source, replace(self.choice, recipe=recipe, default=None, rules=()))
        plan = replace(plan, inputs=self.inputs)
        return plan if self.importance is None else plan.with_importance(self.importance)

    def file(self, plan: Plan) -> OutputFile:
        """What would be written."""
        metadata, _ = plan_metadata(plan)
        return OutputFile(self.path, header_bytes(plan, metadata), plan.tensors)

    def make(self, recipe: Recipe) -> Path:
        """The file of a recipe, which may be there already; an interrupted one is gone on with.

        Raises what `execute.convert` does, and InputError for a file in its place that no search is known to have made.
        """
        note = self._note()
        going_on = note.get("recipe") == recipe.sha256 and note.get("folder") == self.folder.name
        state = self._state()
        if going_on and state is not None and note.get("state") == state:
            return self.path
        if state is not None and not note:
            raise InputError(f"{self.path}: is there already; remove it if no other search is writing it")
        plan = self.plan(recipe)
        plan.check_importance()
        file = self.file(plan)
        check_header(file.header, str(self.out))
        self._write_note({"recipe": recipe.sha256})
        if not going_on:
            self.path.unlink(missing_ok=True)  # its room is needed for the next one
        convert(plan, [file], self.path, self.threads, restart=not going_on)
        self._write_note({"recipe": recipe.sha256, "state": self._state()})
        return self.path

    def left(self) -> list[Path]:
        """Files of a trial that are there, if a search has made them."""
        files = (self.path, part_path(self.path), journal_path(self.path))
        return [path for path in files if path.exists()] if self._note() else []

    def remove(self) -> None:
        """Nothing is left of the trials."""
        for path in self.left():
            path.unlink(missing_ok=True)
        self._note_path.unlink(missing_ok=True)

    def forget(self) -> None:
        """Nothing is left of what earlier searches found, nor of the file that the last one was at."""
        self.remove()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)

    def give_name(self) -> None:
        """The trial becomes the file."""
        self.path.replace(self.out)
        self._note_path.unlink(missing_ok=True)

    @property
    def _note_path(self) -> Path:
        digest = hashlib.sha256(os.fsencode(self.path)).hexdigest()
        return self.folder.parent / f"trial-{digest[:32]}.json"

    def _note(self) -> Mapping[str, object]:
        try:
            value = json.loads(self._note_path.read_text())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) and value.get("path") == str(self.path) else {}

    def _write_note(self, value: Mapping[str, object]) -> None:
        content = {"path": str(self.path), "folder": self.folder.name, **value}
        write_whole(self._note_path, json.dumps(content).encode())

    def _state(self) -> list[int] | None:
        try:
            status = self.path.stat()
        except OSError:
            return None
        return [status.st_size, status.st_mtime_ns]


def types_of(plan: Plan) -> dict[str, TensorType]:
    """The types of all tensors."""
    return {tensor.name: tensor.type for tensor in plan.tensors}
