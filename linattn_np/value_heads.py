"""Grouped value heads: v has G heads for each head of q, k and the gate. A backend gets one head of G * V columns.

These recurrences compute each column of V by itself, so a state [K, G * V] is the group's G states [K, V] side by side.
"""


def grouped_axes(axes: str, groups: int) -> str:
    """The axes of a caller's array: "B H T V" -> "B HV T V" where heads are grouped."""
    return axes.replace("H", "HV") if groups > 1 and has_columns(axes) else axes


def has_columns(axes: str) -> bool:
    """Whether an array's last axis is that of the columns of v."""
    return axes.split()[-1] == "V"


def folds_in_place(x) -> bool:
    """Whether the heads of a group lie side by side in memory, as they do in [B, T, HV, V]."""
    return x.strides[1] == x.shape[3] * x.strides[3]


def fold(x, groups: int):
    """[B, H * G, T, V] -> [B, H, T, G * V], a view where the memory allows it; states alike, with K for T."""
    B, heads, T, V = x.shape
    return merged(x.reshape(B, heads // groups, groups, T, V).swapaxes(2, 3), (B, heads // groups, T, groups * V))


def unfold(x, groups: int):
    """[B, H, T, G * V] -> [B, H * G, T, V], the inverse."""
    B, heads, T, columns = x.shape
    V = columns // groups
    return merged(x.reshape(B, heads, T, groups, V).swapaxes(2, 3), (B, heads * groups, T, V))


def merged(x, shape):
    """`x` in another shape. If that needs a copy, it moves words as wide as rows allow."""
    (words,) = in_words(x)
    if words is x:
        return x.reshape(shape)
    words = words.reshape((*shape[:-1], shape[-1] * x.dtype.itemsize // words.dtype.itemsize))
    contiguous = words if words.strides[-1] == words.dtype.itemsize else words.copy()
    return contiguous.view(x.dtype)  # `view` needs contiguous rows


WORDS = {"complex128": 16, "uint64": 8, "uint32": 4}  # dtypes that copies take as they are, and their bytes


def in_words(*arrays):
    """The arrays as arrays of the widest WORDS of which all rows consist, or as they are. CuPy's kernels of copies find
    the place of each element by divisions, so fewer elements are faster."""
    places = [n for x in arrays for n in (address_of(x), x.shape[-1] * x.dtype.itemsize, *x.strides[:-1])]
    in_rows = all(x.strides[-1] == x.dtype.itemsize for x in arrays)
    for word, size in WORDS.items():
        if in_rows and size > max(x.dtype.itemsize for x in arrays) and not any(n % size for n in places):
            return [x.view(word) for x in arrays]
    return arrays


def address_of(x) -> int:
    """Of a NumPy or CuPy array."""
    return x.ctypes.data if hasattr(x, "ctypes") else x.data.ptr
