"""The parts of docstrings that operators share: parameters by their names, and whole sections.

`public_function` cuts PARAMETERS into entries, each from a line at the left edge, "name : what it is", to the next such
line, and gives an operator those of its parameters that its own docstring lacks. So an entry must be true of every
operator, or step, that has the parameter.
"""

PARAMETERS = """
scale : float, optional
    ``K ** -0.5`` by default; finite in the dtype that is computed in.
initial_state : [N, H, K, V], optional
    S_0 of each of the N sequences: N = B, or ``len(cu_seqlens) - 1``.
output_final_state : bool
    Return ``(o, final_state)``.
state_dtype : dtype, optional
    The dtype of the final state: float32, or float64 beside float64 inputs, unless it is given.
cu_seqlens : host integers [N + 1], optional
    Sequences packed into one row (B = 1): sequence n is tokens ``cu_seqlens[n]:cu_seqlens[n + 1]``. Empty sequences
    are legal and hand their initial state through. The first call with these numbers sends them to the device: make it,
    and wait for it, before a call with the same numbers is captured into a CUDA graph.
mask : bool [B, T], optional
    True for a token, False for padding, which is as if it were not there: it writes nothing, its gate is 0 (no decay),
    and o and all gradients are 0 there, whatever the arrays hold. It costs a copy of every array. Refused beside
    `cu_seqlens`, and where CuPy captures a CUDA graph, which does not keep such copies.
qk_l2norm : bool
    Divide queries and keys by their lengths, ``q / sqrt(|q|^2 + 1e-6)``, in float32 at least. Gradients are those of
    the arrays that are given.
reverse : bool
    Every sequence runs from its last token to its first: S_t comes from S_{t+1}, and the final state is that at the
    first token. No copy.
state_v_first : bool
    `initial_state`, the final state and their gradients are [N, H, V, K].
layout : "bhtd" or "bthd"
    "bthd" takes and returns ``[B, T, H, ...]``. Neither costs a copy.
mode : "auto", "recurrent", "chunk", "staged" or "parallel"
    Token by token; fused chunks; the five stages of `linattn_np.stages` one by one; the quadratic form. All compute the
    same function; "auto" takes the fastest that the backend has.
chunk_size : int, optional
    Tokens in a chunk, a multiple of 16; for the chunked modes.
materialize : bool, optional
    True keeps every chunk's state and computes chunks side by side; False carries one state through; None decides from
    the shape.
precision : "float32" or "tf32", optional
    Of products of float32 arrays on a GPU's tensor cores; by default what the context `linattn_np.precision` says, and
    "float32" outside of one. "tf32" is faster, with a relative error of 4e-4 in place of 1e-6. All else is the same.
backend : "auto", "numpy", "cupy" or "numba"
    "auto" follows the arrays: host arrays run on NumPy, device arrays on CuPy's kernels.
state : [B, H, K, V], or a pool [P, H, K, V] with `slots`
    The states, which are updated in place: float32, float64, float16 or bfloat16. The arithmetic is float32, or float64
    beside float64 inputs. An error leaves them untouched.
slots : integers [B], optional
    Row of the pool that each sequence's state lives in, each at most once. Host integers are checked, and sent to the
    device as `cu_seqlens` are in `gla`; an int64 CuPy array is taken as it is, without synchronising.
pending : float32 [N, H, M, W], optional, with rows for `slots` as `state` has
    Memory of the M <= 8 tokens that the state has not taken yet, for speculative decoding: float64 where the state or
    the arrays are. The arrays then have an axis of T <= M tokens, [B, H, T, ...], and o is [B, H, T, V]: o at a token
    sees the state with the accepted tokens, and this call's tokens up to that one. The state takes these only in the
    next call, which says how many are `accepted`. Until then `pending` has W numbers of each: its decays, its key, and
    the values that it adds along the key. W is 2 K + V, or 1 + K + V where a head has one gate or none. In `rwkv7_step`
    these are its decays, its key, b, the values that it adds along the key, and S^T a, which it adds along b:
    3 K + 2 V. Nothing else may write there.
accepted : int64 [B], optional
    How many of the tokens in `pending`, from the first, the state takes now: 0 to M, by default none. The others are
    dropped. Host numbers are checked; those on a device are not, to save a synchronisation: a number below 0 counts as
    0, one above M as M. A call with T = 0 only gives the state its tokens.
out : array like the result, optional
    Where to write o: memory that no other argument shares, and in which no two elements are one.
"""

RETURNS = """
o : [B, H, T, V], the dtype and memory order of q; or ``(o, final_state)``
"""

RETURNS_OF_STEP = """
o : [B, H, V], the dtype of the first array
"""

RAISES = """
ContractError (a ValueError)
    Shapes or options that do not fit; ContractTypeError (also a TypeError) for dtypes, devices and things
    that are no arrays; NotSupported where no backend can, with every reason. Nothing has run by then.
LinattnWarning
    Arrays that look like [B, T, H, ...] without `layout`, or like decays where their logs are expected.
"""

NOTES = """
Arrays are NumPy's or CuPy's, or anything with ``__dlpack__``: float64, float32, float16 or bfloat16, all the same, but
a gate may be float32 beside half-precision arrays. Subclasses such as masked arrays are refused, and so are arrays that
track gradients, which would be cut: `linattn_np.interop` differentiates. Any strides: slices of a fused buffer are read
in place. v may have more heads than the other arrays, a multiple HV of H: o is then [B, HV, T, V], states [N, HV, K,
V], and value head n goes with head ``n // (HV // H)``. That costs no copy of v and o where the heads lie side by side,
as with ``layout="bthd"``; states are copied.

NaN and inf go where the recurrence takes them, forwards in time: one in k, v, a gate or a state stays in the state, one
in q stays at its token; gradients take those of `do` and `dht` backwards. That holds in every mode on NumPy and Numba,
and in "recurrent" on CuPy. CuPy's kernels on tensor cores multiply whole blocks, in which the weight of a later token
is 0, and 0 times NaN is NaN. There a NaN or inf in v also reaches the tokens before it in its block: of 16 tokens; of
32 on Hopper with half-precision arrays (64 where a head has one gate, or none); of a chunk in mode "staged". One in any
array or in `do` may also reach gradients at the other tokens of its block, of up to 64.
"""
