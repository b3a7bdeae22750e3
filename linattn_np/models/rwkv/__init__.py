"""What RWKV models of all versions have in common; `rwkv6` and `rwkv7` beside this folder add a version each."""
