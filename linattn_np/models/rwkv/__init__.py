"""What RWKV models of all versions have in common; a folder beside this one adds a version, as `rwkv6` does.

version         the tables in which versions differ: parameters, and the arrays that the layers take
names           what files call the parameters, and how they become the official ones
state           what sequences carry from token to token
parameters      what a training changes: all parameters in one vector
model           the methods of a model: calls, states, text, files
"""
