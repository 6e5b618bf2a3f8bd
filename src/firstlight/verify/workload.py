"""What both models are asked to compute: a few sequences, and the ways in which a server would cut them into steps.

The reference runs each sequence once, whole. Attention and the delta rule are causal, so that one run is the right answer
for every way of cutting it: prefill at once, in chunks, token by token, or side by side with other sequences. Each way is a
*phase*, and is there for the faults that only it shows:

    prefill        one sequence at once: past the delta rule's chunk of 64, many pages, a few hundred positions
    decode         single tokens after a prefill, over the end of a page and of a chunk
    second chunk   prefill in chunks, one of them shorter than the convolution's window
    batch          several sequences of different lengths in a step, decode and prefill mixed, on scattered pages and slots;
                   one of them continues another's shared prefix from a copied state
    image          three different rows of positions (models with MRoPE only)
    quiet          modules alone, on inputs so small that the epsilons of norms count
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

PREFILL, DECODE, SECOND_CHUNK, BATCH, IMAGE, QUIET = "prefill", "decode", "second chunk", "batch", "image", "quiet"
LONG = 320
SHARED_PREFIX = 64
"""A multiple of every page size up to 64, and of the delta rule's chunk, after which a state can be exported."""
OTHER_LENGTHS = (90, 40, 150, 100)
IMAGE_LENGTH = 130


@dataclass(frozen=True, slots=True)
class Sequence:
    """Token ids [T] int64 and their positions: [T], or [3, T] where the rows differ."""

    ids: torch.Tensor
    positions: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Row:
    """A request's part of a step: `count` tokens of a sequence from `start` on.

    decode: whether it is a decode row (those come first). export: after so many new tokens the state is also written to the
    sequence's checkpoint slot; 0: it isn't. parent: the sequence whose pages and checkpoint the row starts from, or None.
    """

    sequence: int
    start: int
    count: int
    decode: bool = False
    export: int = 0
    parent: int | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps, each a tuple of rows. `first_judged`: steps before it only fill the caches."""

    name: str
    steps: tuple[tuple[Row, ...], ...]
    first_judged: int = 0
    whole_model: bool = True


def make_sequences(vocabulary: int, position_rows: int, seed: int) -> list[Sequence]:
    """The sequences of all phases: the long one, those of the batch, and with MRoPE (3 position rows) the image's."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> torch.Tensor:
        return torch.randint(0, vocabulary, (length,), generator=generator)

    long = ids(LONG)
    tokens = [long, *(ids(length) for length in OTHER_LENGTHS)]
    tokens[-1][:SHARED_PREFIX] = long[:SHARED_PREFIX]
    sequences = [Sequence(row, torch.arange(len(row))) for row in tokens]
    if position_rows == 3:
        sequences.append(Sequence(ids(IMAGE_LENGTH), _image_positions(IMAGE_LENGTH)))
    return sequences


def _image_positions(length: int) -> torch.Tensor:
    """[3, T]: text, then an image of 6 rows of 9 tokens, then text from the largest position on."""
    rows, columns, first = 6, 9, 31
    text = torch.arange(length).expand(3, -1)
    positions = text.clone()
    grid = torch.stack(
        [torch.zeros(rows, columns), *torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")]
    )
    positions[:, first : first + rows * columns] = first + grid.flatten(1).long()
    after = first + rows * columns
    positions[:, after:] = text[:, after:] - after + first + max(rows, columns)
    return positions


def make_phases(position_rows: int) -> list[Phase]:
    """The phases over `make_sequences`, in the order in which they are reported."""
    prompt, end = 123, 132  # over 128, where a page ends (of any usual size) and a chunk of the delta rule
    decode = ((Row(0, 0, prompt),), *((Row(0, t, 1, decode=True),) for t in range(prompt, end)))
    cuts = (0, 70, 72, 73, 200, LONG)
    chunks = tuple((Row(0, a, b - a),) for a, b in pairwise(cuts))
    batch = (
        (Row(1, 0, 40), Row(3, 0, 129), Row(0, 0, 100, export=SHARED_PREFIX)),
        (
            Row(3, 129, 1, True),
            Row(1, 40, 1, True),
            Row(2, 0, 33),
            Row(4, SHARED_PREFIX, 30, parent=0),
            Row(0, 100, 50),
        ),
        (Row(1, 41, 1, True), Row(4, 94, 1, True), Row(2, 33, 1, True), Row(3, 130, 1, True)),
        (Row(4, 95, 1, True), Row(2, 34, 1, True), Row(3, 131, 1, True), Row(1, 42, 48), Row(0, 150, 45)),
        (Row(2, 35, 1, True), Row(4, 96, 1, True), Row(3, 132, 18), Row(0, 195, 5)),
    )
    phases = [
        Phase(PREFILL, ((Row(0, 0, LONG),),)),
        Phase(DECODE, decode, 1),
        Phase(SECOND_CHUNK, chunks, 1),
        Phase(BATCH, batch),
    ]
    if position_rows == 3:
        image = 1 + len(OTHER_LENGTHS)
        steps = ((Row(image, 0, 80),), (Row(image, 80, 49),), (Row(image, IMAGE_LENGTH - 1, 1, True),))
        phases.append(Phase(IMAGE, steps))
    return [*phases, Phase(QUIET, ((Row(0, 0, LONG),),), whole_model=False)]
