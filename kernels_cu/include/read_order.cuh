// what      When a token's output reads the state: the one fact in which GLA and RWKV-6 differ; everything else is
//           shared.

// GLA: o_t sees the state after token t was written; the present token weighs q . k.
struct AfterWrite {
  static constexpr bool reads_before_write = false;
};

// RWKV-6: o_t sees the state before token t was written; the present token weighs q . (u k).
struct BeforeWrite {
  static constexpr bool reads_before_write = true;
};
