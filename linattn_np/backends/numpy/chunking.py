"""How a problem is cut into chunks: which tokens, which sequence, where states come in and go out."""

import numpy as np

from ...contract import SUB_CHUNK

CHUNK = 32  # half of the device kernels': on BLAS the fewer products within a chunk outweigh the more states


class Chunking:
    """The chunk table of a problem's sequences and the states at their ends."""

    def __init__(self, problem):
        self.size = problem.chunk_size or CHUNK
        if "C" not in problem.sizes:  # that of a stage's arrays stays: of others no more than any tokens fill
            longest = problem.spans.longest
            self.size = min(self.size, max(-(-longest // SUB_CHUNK), 1) * SUB_CHUNK)
        self.sequences = problem.spans.count
        self.table, bounds = problem.spans.chunks(self.size), problem.spans.chunk_bounds(self.size)
        filled = np.flatnonzero(np.diff(bounds)).tolist()
        self.begins = {int(bounds[s]): s for s in filled}  # chunk -> the sequence it begins
        self.ends = {int(bounds[s + 1]) - 1: s for s in filled}  # chunk -> the sequence it ends

    @property
    def count(self):
        """The number of chunks."""
        return len(self.table)

    def of_rows(self, states, rows):
        """The states [N, H, K, V] of a block of rows: a view [B, sequences of a batch entry, H, K, V]."""
        S = self.sequences
        return states.reshape(len(states) // S, S, *states.shape[1:])[rows[0], :, rows[1]]

    def scan(self, rows, first, decay, h, states, written=None):
        """Completes the states h [B, H, n + 1, K, V] of n chunks from chunk `first` on: to h_{c+1}, which must hold
        what the values of chunk c add, adds diag(decay_c) h_c + written(c, h_c).

        h_0 must hold the state before the chunks, unless a sequence begins there. `states` [N, H, K, V] holds the
        initial states and receives the final ones of sequences that end here.
        """
        carried = np.empty(h[:, :, 0].shape, h.dtype)
        chunks = (np.moveaxis(x, 2, 0) for x in (decay[..., None], h[:, :, :-1], h[:, :, 1:]))
        for c, (factor, before, after) in enumerate(zip(*chunks), start=first):
            if (s := self.begins.get(c)) is not None:
                before[...] = self.of_rows(states, rows)[:, s]
            np.multiply(factor, before, out=carried)
            after += carried
            if written is not None:
                after += written(c - first, before)
            if (s := self.ends.get(c)) is not None:
                self.of_rows(states, rows)[:, s] = after

    def scan_back(self, rows, first, decay, dh, dstates, read=None):
        """Completes the gradients dh [B, H, n + 1, K, V] of these states, last chunk first: to dh_c, which must hold
        what the outputs of chunk c add, adds diag(decay_c) dh_{c+1} + read(c, dh_{c+1}).

        dh_n must hold the gradient of the state after the chunks, unless a sequence ends there. `dstates` [N, H, K, V]
        holds the final states' gradients and receives the initial states' of sequences that begin here.
        """
        for c in reversed(range(dh.shape[2] - 1)):
            if (s := self.ends.get(first + c)) is not None:
                dh[:, :, c + 1] = self.of_rows(dstates, rows)[:, s]
            dh[:, :, c] += decay[:, :, c, :, None] * dh[:, :, c + 1]
            if read is not None:
                dh[:, :, c] += read(c, dh[:, :, c + 1])
            if (s := self.begins.get(first + c)) is not None:
                self.of_rows(dstates, rows)[:, s] = dh[:, :, c]
