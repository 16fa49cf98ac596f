"""Memory of a session: what it takes apart from the cache must not grow with context x chunk."""

from pathlib import Path

import pytest

from m3_runtime import Model

CONTEXTS = (4096, 1 << 20)
CHUNKS = (64, 1024)


@pytest.mark.parametrize("scan", ["full", "low_bit"])
@pytest.mark.parametrize("attention", ["sparse", "dense"])
def test_no_buffer_grows_with_context_times_chunk(tiny_gguf: Path, attention: str, scan: str) -> None:
    """Scratch is a sum of parts that grow with one of the two, so that the mixed difference is nothing."""
    with Model(tiny_gguf, device="cpu") as model:

        def scratch(context: int, chunk: int) -> int:
            options = model.memory(context=context, chunk=chunk, attention=attention, index_scan=scan, threads=2)
            return options.scratch_bytes

        grown = [scratch(CONTEXTS[1], chunk) - scratch(CONTEXTS[0], chunk) for chunk in CHUNKS]
        assert grown[0] == grown[1]
        # What does grow with the context: block scores of a few queries, for each thread.
        blocks = (CONTEXTS[1] - CONTEXTS[0]) // model.hparams.block_size
        assert grown[0] <= 2 * blocks * 256
        assert scratch(CONTEXTS[0], CHUNKS[1]) > scratch(CONTEXTS[0], CHUNKS[0])


def test_recorded_scores_are_the_exception(tiny_gguf: Path) -> None:
    with Model(tiny_gguf, device="cpu") as model:
        h = model.hparams

        def scores(context: int, chunk: int) -> int:
            with_scores = model.memory(context=context, chunk=chunk, record=("scores",)).scratch_bytes
            return with_scores - model.memory(context=context, chunk=chunk).scratch_bytes

        for context in CONTEXTS:
            for chunk in CHUNKS:
                assert scores(context, chunk) == context // h.block_size * chunk * h.n_index_head * 4
