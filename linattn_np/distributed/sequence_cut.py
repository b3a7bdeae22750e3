"""How a sequence is cut: segments of tokens, each on one rank, and which sequence crosses from one to the next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SequencePiece:
    """The tokens of one sequence in one segment."""

    sequence: int
    start: int  # of the segment's tokens
    stop: int
    has_predecessor: bool  # another segment, before this one in the order of the pass, has tokens of the sequence
    has_successor: bool  # another segment, after this one in the order of the pass, has tokens of the sequence


@dataclass(frozen=True)
class RankSegment:
    """Tokens of one rank that are computed in one call."""

    index: int  # in the order of the tokens, over all ranks
    rank: int
    slot: int  # among those of its rank
    start: int  # of its rank's tokens
    stop: int
    pieces: tuple[SequencePiece, ...]

    @property
    def incoming_piece(self) -> SequencePiece | None:
        """The piece whose state comes from another segment; at most one does."""
        return next((piece for piece in self.pieces if piece.has_predecessor), None)

    @property
    def outgoing_piece(self) -> SequencePiece | None:
        """The piece whose state goes on to another segment; at most one does."""
        return next((piece for piece in self.pieces if piece.has_successor), None)


class Cut:
    """The segments of all ranks, known alike on every rank, in the order of the tokens.

    `lengths` are the ranks' tokens, `bounds` [N + 1] those of the sequences, of which a dense batch has one for all of
    its rows. With `reverse` the pass that is cut runs from the last token to the first. Segments have `size` tokens at
    most; without a size each rank has one.
    """

    def __init__(self, lengths, bounds, reverse, size=None):
        self.reverse = reverse
        self.segments = []
        first = 0
        for rank, length in enumerate(lengths):
            step = size or max(length, 1)
            for slot, start in enumerate(range(0, max(length, 1), step)):
                stop = min(start + step, length)
                pieces = tuple(self.pieces(bounds, first + start, first + stop))
                self.segments.append(RankSegment(len(self.segments), rank, slot, start, stop, pieces))
            first += length
        self.slots = max(segment.slot for segment in self.segments) + 1  # of the rank that has most segments

    def pieces(self, bounds, first, last):
        for n, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:])):
            if max(start, first) < min(stop, last):
                before, after = start < first, stop > last
                yield SequencePiece(
                    n,
                    max(start, first) - first,
                    min(stop, last) - first,
                    *((after, before) if self.reverse else (before, after)),
                )

    def in_pass_order(self):
        """The segments in the order of the pass."""
        return self.segments[::-1] if self.reverse else self.segments

    def segments_of(self, rank):
        return [segment for segment in self.segments if segment.rank == rank]

    @property
    def has_crossing_sequences(self) -> bool:
        """Whether any state has to go from one segment to another."""
        return any(segment.outgoing_piece for segment in self.segments)

    def ending_pieces(self):
        """[(segment, piece)] in which a sequence ends: one for each that has tokens."""
        return [(segment, piece) for segment in self.segments for piece in segment.pieces if not piece.has_successor]
