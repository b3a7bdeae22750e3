"""One package a backend; `linattn_np.dispatch` says what each of them has."""
