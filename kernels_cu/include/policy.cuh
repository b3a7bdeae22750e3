// what      The two facts in which GLA and RWKV-6 differ; everything else is shared.

// o_t sees the state after token t was written; the present token weighs q . k.
struct Gla {
  static constexpr bool reads_before_write = false;
};

// o_t sees the state before token t was written; the present token weighs q . (u k).
struct Rwkv6 {
  static constexpr bool reads_before_write = true;
};
