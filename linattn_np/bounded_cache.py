"""A cache for results that later calls can use, bounded in bytes."""

from threading import Lock


class Cache:
    """Values by key: at most `entries` values of at most `most` bytes together, or one value that is larger.

    The caller of `keep` says how many bytes a value takes. The oldest value that was not read since the last eviction
    is evicted first. Several threads may use a cache.
    """

    def __init__(self, most: int, entries: int):
        self.most, self.entries, self.bytes = most, entries, 0
        self.kept: dict = {}  # {key: [value, its bytes, whether it was read since the last eviction]}
        self.lock = Lock()

    def get(self, key):
        """The value, or None."""
        entry = self.kept.get(key)
        if entry is None:
            return None
        entry[2] = True
        return entry[0]

    def keep(self, key, value, nbytes: int):
        """Keeps `value`, unless another thread has kept one with this key; returns the value that is kept."""
        with self.lock:
            if key in self.kept:
                return self.kept[key][0]
            while self.kept and (len(self.kept) >= self.entries or self.bytes + nbytes > self.most):
                oldest = next(iter(self.kept))
                entry = self.kept.pop(oldest)
                if entry[2]:
                    entry[2] = False
                    self.kept[oldest] = entry
                else:
                    self.bytes -= entry[1]
            self.kept[key] = [value, nbytes, False]
            self.bytes += nbytes
            return value
