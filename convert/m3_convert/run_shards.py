"""The shards of one run of a conversion: which are still to be read, which to be downloaded, and the disk they take.

Of a source on this machine nothing is downloaded.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from m3_convert.disk_room import Room, fits
from m3_convert.hub_shards import HubShards
from m3_convert.progress import Downloads
from m3_convert.shard_order import ShardOrder
from m3_convert.shards import Shards
from m3_convert.temporary_shards import FOLDER_SUFFIX, TemporaryShards
from m3_runtime.errors import InputError
from m3_runtime.quantities import format_bytes


@dataclass(frozen=True)
class Demand:
    """What a run has to download."""

    shards: int
    of: int  #: shards that it reads; the others are there
    bytes: int
    peak_bytes: int  #: that are there at a time with --discard-source, at most

    def __str__(self) -> str:
        return f"{self.shards} of {self.of} shards to download, {format_bytes(self.bytes)}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Supply:
    """The shards that one run reads, in their order. Nothing is written, removed or downloaded before `begin`.

    order: what is left to be read. target: the output. discard: shards are kept beside the output, and only while they
    are needed; they must be on the Hub (see `check_discardable`).
    """

    def __init__(self, shards: Shards, order: ShardOrder, target: Path, *, discard: bool) -> None:
        self.shards, self.order = shards, order
        self.name = target.name  #: of the output, for messages
        self._folder = target.with_name(target.name + FOLDER_SUFFIX)
        self._hub = shards if isinstance(shards, HubShards) else None
        self._temporary: TemporaryShards | None = None
        if discard:
            assert self._hub is not None, "see check_discardable"
            self.shards = self._temporary = TemporaryShards(self._hub, self._folder, order)

    @property
    def discards(self) -> bool:
        """True if room gets free when shards are released."""
        return self._temporary is not None

    def rooms(self, output: Room) -> list[Room]:
        """What the run takes on disks: the output and what is downloaded. The next shard is downloaded ahead if there
        is room for it."""
        if self._temporary is not None:
            self._temporary.ahead = True
            self._temporary.ahead = fits([output, self._temporary.room()])
            return [output, self._temporary.room()]
        return [output] if self._hub is None else [output, self._hub.room(self.order.shards)]

    def demand(self) -> Demand | None:
        """What is to be downloaded; None for a source on this machine."""
        if self._hub is None:
            return None
        missing = self._hub.missing(self.order.shards)
        sizes = {shard: self._hub.size(shard) for shard in missing}
        coming = missing if self._temporary is None else self._temporary.incomplete()
        ahead = self._temporary is None or self._temporary.ahead
        peak = self.order.peak(lambda shard: sizes.get(shard, 0), ahead=ahead)
        return Demand(len(coming), len(self.order.shards), sum(map(self._hub.size, coming)), peak)

    def begin(self) -> list[str]:
        """Takes over what an earlier run left. Returns what there is to say: that, and what will be downloaded."""
        if self._temporary is not None:
            self._temporary.adopt()
        left = self._temporary is None and self._folder.exists()
        said = [f"{self._folder}: is left of a run with --discard-source, and not used"] if left else []
        demand = self.demand()
        if self._hub is not None and demand is not None and demand.shards:
            self._hub.expect(demand.shards)
            text = f"{self.name}: {demand}"
            if self._temporary is not None:
                text += f", at most {format_bytes(demand.peak_bytes)} of them on the disk at a time"
                text += "" if self._temporary.ahead else "; there is no room to download one ahead"
            said.append(text)
        return said

    def show(self, downloads: Downloads) -> None:
        """Where downloads are shown from now on."""
        if self._hub is not None:
            self._hub.downloads = downloads

    def close(self) -> None:
        """Ends downloads. What has arrived stays."""
        if self._temporary is not None:
            self._temporary.close()

    def kept(self) -> list[str]:
        """What there is to say of shards that the next run can use, if the run has failed."""
        return self._temporary.kept() if self._temporary is not None else []

    def remove(self) -> list[str]:
        """Removes what was downloaded beside the output. Returns what there is to say if that is not possible."""
        return self._temporary.remove() if self._temporary is not None else []


def check_discardable(shards: Shards) -> None:
    """Raises InputError for shards that --discard-source is not meant for."""
    if not isinstance(shards, HubShards):
        raise InputError("--discard-source is for an id on the Hub, and this source is on this machine: it stays there")
