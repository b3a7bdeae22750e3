"""How error messages show a value: in one line."""

import reprlib

WIDTH = 100
short = reprlib.Repr()
short.maxstring = short.maxother = short.maxlong = 60
short.maxlist = short.maxtuple = 6


def kind_of(x) -> str:
    """The type's full name."""
    return f"{type(x).__module__}.{type(x).__qualname__}"


def shown(x) -> str:
    """`x` as Python writes it, shortened to a line; of an array its shape and dtype."""
    shape = () if isinstance(x, type) else getattr(x, "shape", ())
    if shape and hasattr(x, "dtype"):
        return f"a {kind_of(x)} {tuple(shape)} of {x.dtype}"
    try:
        text = " ".join(short.repr(x).split())
    except Exception:  # a repr of the caller's, or an integer of thousands of digits
        return f"a {kind_of(x)}"
    return text if len(text) <= WIDTH else f"{text[:WIDTH]}..."


def cast(name: str, dtype, library: str) -> str:
    """How an array of a library, named as `array_kinds.kind` names it, is brought into a NumPy dtype, in its words."""
    known = {"torch": f"{name}.to(torch.{dtype})", "jax": f"{name}.astype(jnp.{dtype})"}
    return known.get(library, f"{name}.astype({str(dtype)!r})")
