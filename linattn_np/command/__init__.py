"""The command `linattn-np`, which is also `python -m linattn_np`: a module for each subcommand.

A module has ``add_options(parser)``, which adds its options, and ``run(options)``. Its docstring is printed by
``--help``. If it refuses something, it raises ValueError, ImportError or OSError, of which the user sees one line.
"""

# Every subcommand is a module of this package with the same name.
COMMANDS = {
    "generate": "write text with an RWKV model, alone, as a chat or many texts side by side",
    "train": "train an RWKV model on a text, new or from a published one",
    "merge": "write a model with a low-rank adapter merged into it",
    "evaluate": "tell a model's loss and perplexity on a text",
    "quantise": "write a model with its matrices in fewer bits, and tell what that costs",
    "compare": "draw time and memory of attention and its linear kin against the length of the sequence",
    "bench": "time every operator on this machine beside the floor of its memory",
    "info": "tell versions, devices, backends, caches and threads: what to paste into a bug report",
}
