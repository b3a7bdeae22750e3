"""How the tokens of a call are cut into segments, each on one rank, and which sequences continue in the next one."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SequencePiece:
    """The tokens of one sequence in one segment."""

    sequence: int  # its number in the call
    start: int  # its first token, counted in the segment
    stop: int  # its last token + 1
    # Whether any segment before, or after, this one in the order of the pass (`Cut.reverse`) has tokens of the
    # sequence. It need not be the neighbour: segments between may be empty.
    has_predecessor: bool
    has_successor: bool


@dataclass(frozen=True)
class RankSegment:
    """Tokens of one rank that are computed in one call."""

    index: int  # among the segments of all ranks, in the order of the tokens
    rank: int
    slot: int  # its number among the segments of its rank
    start: int  # its first token, counted on its rank
    stop: int  # its last token + 1
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
    """The segments of all ranks, in the order of the tokens. Every rank computes the same cut.

    lengths : how many tokens each rank has
    bounds : cu_seqlens [N + 1] of the tokens of all ranks; [0, T] for a dense batch, whose rows are cut alike
    reverse : whether the pass for which this is a cut runs from the last token to the first; segments are in the order
        of the tokens all the same
    size : the most tokens of a segment; None for one segment per rank
    """

    def __init__(self, lengths, bounds, reverse, size=None):
        self.reverse = reverse
        self.segments = []
        first = 0
        for rank, length in enumerate(lengths):
            step = size or max(length, 1)  # a rank without tokens gets an empty segment
            for slot, start in enumerate(range(0, max(length, 1), step)):
                stop = min(start + step, length)
                pieces = tuple(self.pieces(bounds, first + start, first + stop))
                self.segments.append(RankSegment(len(self.segments), rank, slot, start, stop, pieces))
            first += length
        self.slots = max(segment.slot for segment in self.segments) + 1  # segments of the rank that has the most

    def pieces(self, bounds, first, last):
        """Yields the pieces of a segment of the tokens first ... last - 1, counted over all ranks, as `bounds` are. A
        sequence without tokens has none."""
        for n, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:])):
            if max(start, first) < min(stop, last):
                before, after = start < first, stop > last
                yield SequencePiece(
                    n,
                    max(start, first) - first,
                    min(stop, last) - first,
                    *((after, before) if self.reverse else (before, after)),
                )
