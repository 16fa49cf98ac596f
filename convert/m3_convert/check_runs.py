"""Which runs a check makes over the text, and what they take: memory and work."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from m3_convert.divergence import SLICE, SLICE_BYTES
from m3_convert.layered_model import LayeredModel
from m3_convert.mixed_model import MixedModel
from m3_convert.walker import CHUNK, MemoryEstimate, WalkOptions, head_options, head_share, read_share, session_options
from m3_runtime.engine import Hparams

HEAD_LOGITS = 1 << 25  #: logits of one run that are held at once, as far as a row allows


@dataclass(frozen=True)
class CheckRuns:
    """The runs of a check. All go over the same tokens; each has its own hidden states but for the isolated one.

    reference: free. candidate: free, its own lists; in dense attention it reads every block. forced: the candidate
    with the reference's lists. isolated: each layer of the candidate, fed with the reference's hidden states; only
    its lists count. groups: the candidate with one group of tensors restored, free.
    logits: what comes out of the head of all runs is compared, too.
    """

    reference: LayeredModel
    candidate: LayeredModel
    reference_options: WalkOptions
    candidate_options: WalkOptions
    logits: bool = True
    isolated: bool = False
    groups: Sequence[MixedModel] = ()

    @property
    def forced(self) -> bool:
        """True if there is a forced run: without logits it would tell nothing."""
        return self.logits

    @property
    def hparams(self) -> Hparams:
        return self.reference.hparams

    @property
    def forced_options(self) -> WalkOptions:
        o = self.candidate_options
        return WalkOptions(o.kv_type, o.index_type, o.threads)

    def stages(self, n_tokens: int) -> list[tuple[str, float]]:
        """What is done one after the other, and the work in it as it is told to `advance`."""
        h = self.hparams
        layers = [(f"layer {i + 1} of {h.n_layer}", n_tokens * self._layer_work(i)) for i in range(h.n_layer)]
        return [*layers, ("logits", n_tokens * self._head_work())] if self.logits else layers

    def _layer_work(self, layer: int) -> float:
        sparse = layer >= self.hparams.n_dense_layer
        reading = 1 + read_share(self.candidate)
        work = 1 + read_share(self.reference) + reading
        work += sum(1 + read_share(group) for group in self.groups if group.first_layer <= layer)
        return work + sparse * (self.isolated + self.forced * reading)

    def _head_work(self) -> float:
        share = head_share(self.hparams)
        return sum(share + read_share(side) for side in self.heads()) + share * (self.forced + self._borrowed_heads())

    def heads(self) -> Iterator[LayeredModel]:
        """The models whose heads are bound at the end."""
        yield self.reference
        yield self.candidate
        yield from (group for group in self.groups if group.has_head)

    def _borrowed_heads(self) -> int:
        return sum(not group.has_head for group in self.groups)

    # -------------------------------------------------------------------------------------------- memory

    def head_rows(self, n_tokens: int) -> int:
        """Rows that go through the head together."""
        return max(1, min(CHUNK, n_tokens, HEAD_LOGITS // self.hparams.n_vocab))

    def memory(self, n_tokens: int) -> MemoryEstimate:
        """What the runs take at their peak for `n_tokens` tokens."""
        h = self.hparams
        n_blocks = -(-n_tokens // h.block_size)
        # A state for each run; a list for each free run, and for the reference if another reads it.
        free = 1 + len(self.groups)
        states = (1 + free + self.forced) * n_tokens * h.n_embd * 4
        lists = (free + self.isolated + self.forced) * n_tokens * h.n_index_head * h.top_k * 4
        # Of a chunk: scores and masses as recorded and as copied, and some ten temporaries of one byte to eight.
        scores, masses = h.n_index_head * n_blocks * 100, h.n_head * h.top_k * 24
        chunk = min(CHUNK, n_tokens) * (scores + masses + 2 * h.n_embd * 4)
        divergence = self.logits * (1 + free) * n_tokens * 24
        phases = self._layer_memory(n_tokens, chunk)
        if self.logits:
            phases.append(self._head_memory(n_tokens))
        own = max(phase.own for phase in phases)
        mapped = max(phase.total for phase in phases) - own
        return MemoryEstimate(states + lists + divergence + own, mapped)

    def _layer_memory(self, n_tokens: int, chunk: int) -> list[MemoryEstimate]:
        """What each layer of each side takes while it is bound; chunk: bytes on top."""
        record = ("blocks", "scores", "mass")
        sides = [(self.reference, self.reference_options, record), (self.candidate, self.candidate_options, ())]
        sides += [(group, self.candidate_options, ()) for group in self.groups]
        found = []
        for side, options, taps in sides:
            for layer in range(self.hparams.n_layer):
                session = side.model.memory(**session_options(layer, n_tokens, options, taps)).total
                owned = side.owned_bytes(layer)
                found.append(MemoryEstimate(session + owned + chunk, side.layer_bytes(layer) - owned))
        return found

    def _head_memory(self, n_tokens: int) -> MemoryEstimate:
        h, rows = self.hparams, self.head_rows(n_tokens)
        own = 2 * rows * h.n_vocab * 4 + SLICE_BYTES * max(h.n_vocab, SLICE)
        mapped = 0
        for side in self.heads():
            owned = side.owned_bytes(h.n_layer)
            own += side.model.memory(**head_options(h, rows, self.candidate_options)).total + owned
            mapped += side.layer_bytes(h.n_layer) - owned
        return MemoryEstimate(own, mapped)
