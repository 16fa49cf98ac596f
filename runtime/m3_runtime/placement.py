"""Where the bytes of a run lie: the plan that is shown before anything is loaded, and what it refuses."""

from dataclasses import dataclass
from typing import Any

from m3_runtime import memory
from m3_runtime.errors import MachineError
from m3_runtime.quantities import format_bytes

_COLUMNS = ("weights", "experts", "K/V", "index keys", "scratch", "in all", "free")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a session needs on the model's device, and beside a GPU in the computer's memory; see `m3_plan`."""

    device: str  #: "cpu" or "cuda"
    device_name: str
    weights_bytes: int  #: on the device, without routed experts; on the CPU in the mapped file unless `mapped` is False
    experts_bytes: int  #: routed experts there
    cpu_experts_bytes: int  #: routed experts that stay in the mapped file beside a GPU, for the CPU
    loaded_bytes: int  #: of the first two: on the GPU already
    kv_bytes: int
    index_bytes: int
    scratch_bytes: int
    host_bytes: int  #: of the computer's memory for work on cpu_experts_bytes
    pinned_bytes: int  #: of these: what transfers pin
    expert_layers: int
    cpu_expert_layers: int  #: of these: with their experts on the CPU beside a GPU
    free_bytes: int | None  #: of a GPU; None on the CPU
    total_bytes: int | None
    mapped: bool  #: the CPU finds weights in the mapped file

    @property
    def session_bytes(self) -> int:
        """What the session takes on the device."""
        return self.kv_bytes + self.index_bytes + self.scratch_bytes

    @property
    def device_bytes(self) -> int:
        """What the device holds once the session is open."""
        return self.weights_bytes + self.experts_bytes + self.session_bytes

    @property
    def needed_bytes(self) -> int:
        """Of `device_bytes`, what is not there yet."""
        return self.device_bytes - self.loaded_bytes

    def session_room(self, room: int | None, *, all_experts: bool) -> int | None:
        """Bytes that are left for a session: of a GPU what the weights leave, else `room`. None if unknown.

        room: bytes of the computer's memory that are left. all_experts: routed experts must be on the GPU too; else
        they take nothing from a session.
        """
        if self.free_bytes is None:
            return room
        return max(0, self.free_bytes - self.weights_bytes - (self.experts_bytes if all_experts else 0))

    def check(self, context: int, room: int | None) -> None:
        """Raises MachineError with the numbers, and with what would help, if it does not fit.

        context: tokens of the session, for the message. room: bytes of the computer's memory that are left for a
        session, None if unknown; beside a GPU, for experts on the CPU.
        """
        if self.free_bytes is None or self.total_bytes is None:
            memory.check_session_fits(self.session_bytes, context, room)
            return
        if self.needed_bytes > self.free_bytes:
            raise MachineError(
                f"not enough memory on {self.device_name}: {format_bytes(self.needed_bytes)} are needed "
                f"({self._parts()}), "
                f"{format_bytes(self.free_bytes)} of {format_bytes(self.total_bytes)} are free; {self._advice()}"
            )
        if room is not None and self.host_bytes > room:
            raise MachineError(
                f"not enough memory: work on experts on the CPU takes {format_bytes(self.host_bytes)}, "
                f"{format_bytes(room)} are free"
            )

    def _parts(self) -> str:
        parts = (
            ("weights", self.weights_bytes),
            ("experts", self.experts_bytes),
            ("K/V", self.kv_bytes),
            ("index keys", self.index_bytes),
            ("scratch", self.scratch_bytes),
        )
        text = ", ".join(f"{name} {format_bytes(n)}" for name, n in parts if n)
        return f"{text}; {format_bytes(self.loaded_bytes)} of it are there" if self.loaded_bytes else text

    def _advice(self) -> str:
        """What would make it fit."""
        assert self.free_bytes is not None
        without = self.needed_bytes - self.experts_bytes
        cache = self.kv_bytes + self.index_bytes
        if self.experts_bytes and without <= self.free_bytes:
            return f"with --experts-on cpu {format_bytes(without)} are needed there"
        both = "--experts-on cpu and " if self.experts_bytes else ""
        if without - cache <= self.free_bytes:
            return f"{both}a smaller --context would fit"
        return f"{both}a file of a smaller type would need less"

    def table(self) -> list[str]:
        """A few lines for people: a row for each device."""
        free = memory.available_memory()
        session = [self.kv_bytes, self.index_bytes]
        own = [self.weights_bytes, self.experts_bytes, *session, self.scratch_bytes, self.device_bytes]
        if self.free_bytes is None:
            rows = [("memory", [*own, free])]
        else:
            rows = [(self.device, [*own, self.free_bytes])]
            if self.cpu_expert_layers:
                total = self.cpu_experts_bytes + self.host_bytes
                rows.append(("memory", [None, self.cpu_experts_bytes, None, None, self.host_bytes, total, free]))
        lines = ["plan     " + "".join(f"{name:>12}" for name in _COLUMNS)]
        lines += [f"  {name:7}" + "".join(f"{_cell(n):>12}" for n in cells) for name, cells in rows]
        if self.cpu_expert_layers:
            lines.append(
                f"  experts of {self.cpu_expert_layers} of {self.expert_layers} layers on the CPU, in the mapped file; "
                f"{format_bytes(self.pinned_bytes)} of the memory pinned"
            )
        return lines

    def as_json(self) -> dict[str, Any]:
        """The rows of the table under the names of the devices, and how experts are divided."""
        free = memory.available_memory()
        own = {
            "weights_bytes": self.weights_bytes,
            "experts_bytes": self.experts_bytes,
            "loaded_bytes": self.loaded_bytes,
            "kv_bytes": self.kv_bytes,
            "index_bytes": self.index_bytes,
            "scratch_bytes": self.scratch_bytes,
            "free_bytes": free if self.free_bytes is None else self.free_bytes,
        }
        report: dict[str, Any] = {"memory" if self.free_bytes is None else self.device: own}
        if self.free_bytes is not None:
            report["memory"] = {
                "experts_bytes": self.cpu_experts_bytes,
                "scratch_bytes": self.host_bytes,
                "pinned_bytes": self.pinned_bytes,
                "free_bytes": free,
            }
        return report | {"expert_layers": self.expert_layers, "cpu_expert_layers": self.cpu_expert_layers}


def _cell(n: int | None) -> str:
    return "-" if n is None else format_bytes(n)
