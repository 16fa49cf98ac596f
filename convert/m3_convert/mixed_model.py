"""A candidate with one group of its tensors restored from the reference: what that gives back is the group's to answer
for."""

import hashlib
from collections.abc import Iterator, Sequence

from m3_convert.layered_model import LayeredModel, Origin
from m3_convert.tensor_group import tensor_group
from m3_convert.tensor_map import layer_of
from m3_convert.weights import Part
from m3_runtime.engine import Model


class MixedWeights:
    """Some tensors of one model, all others of another, neither of which it owns."""

    def __init__(self, candidate: LayeredModel, reference: LayeredModel, restored: frozenset[str]) -> None:
        self._candidate, self._reference, self._restored = candidate, reference, restored
        self.mapped = candidate.mapped and reference.mapped
        self.n_bytes = candidate.n_bytes

    def _side(self, tensor: str) -> LayeredModel:
        return self._reference if tensor in self._restored else self._candidate

    def parts(self, tensor: str) -> Iterator[Part]:
        return self._side(tensor).weights.parts(tensor)

    def release(self, tensors: Sequence[str]) -> None:
        for side in (self._candidate, self._reference):
            side.weights.release([tensor for tensor in tensors if self._side(tensor) is side])

    def close(self) -> None:
        """Nothing to do: the two models close their own."""


class MixedModel(LayeredModel):
    """The candidate but for one group, which has the reference's values and types. Both must stay open.

    group: of TENSOR_GROUPS, or a name for `tensors`. Messages name the candidate.
    """

    def __init__(
        self, candidate: LayeredModel, reference: LayeredModel, group: str, tensors: frozenset[str] | None = None
    ) -> None:
        ours = {t.name: t for t in reference.model.gguf.tensors}
        restored = frozenset(group_tensors(candidate, group)) if tensors is None else tensors
        header = candidate.model.gguf.header({name: ours[name].type for name in restored})
        model = Model.from_header(
            header, candidate.name, device=candidate.model.backend_name, isa=candidate.model.isa_name
        )
        weights = MixedWeights(candidate, reference, restored)
        super().__init__(candidate.name, candidate.kind, model, weights, Origin())
        self.group = group
        self.candidate = candidate
        self._restored, self._reference = restored, reference
        layers = [layer_of(name) for name in restored]
        embedded = "token_embd.weight" in restored
        #: The first layer that evaluates another way than the candidate's; n_layer if only norm and head do.
        self.first_layer = 0 if embedded else min((n for n in layers if n >= 0), default=self.hparams.n_layer)
        #: True if output norm or head are among the restored tensors.
        self.has_head = bool(restored & {"output_norm.weight", "output.weight"})

    def owned_bytes(self, layer: int) -> int:
        return sum(
            self._sizes[name]
            for name in self._needed(layer)
            if not (self._reference if name in self._restored else self.candidate).mapped
        )

    @property
    def group_bytes(self) -> tuple[int, int]:
        """Bytes of the group in the candidate and in the reference."""
        theirs = {t.name: t.n_bytes for t in self.candidate.model.gguf.tensors}
        return sum(theirs[name] for name in self._restored), sum(self._sizes[name] for name in self._restored)


def group_tensors(side: LayeredModel, group: str) -> list[str]:
    """The names of a group's tensors."""
    return [t.name for t in side.model.gguf.tensors if tensor_group(t.name) == group]


def same_group(reference: LayeredModel, candidate: LayeredModel, group: str) -> bool:
    """True if all tensors of a group have the same types and bytes on both sides. Reads as far as they are equal."""
    ours, theirs = ({t.name: t.type for t in side.model.gguf.tensors} for side in (reference, candidate))
    names = group_tensors(candidate, group)
    if any(ours[name] != theirs[name] for name in names):
        return False
    return all(_digest(reference, name) == _digest(candidate, name) for name in names)


def _digest(side: LayeredModel, tensor: str) -> bytes:
    digest = hashlib.sha256()
    for _, data in side.weights.parts(tensor):
        digest.update(data)
    side.weights.release([tensor])
    return digest.digest()
