"""What RWKV models of all versions have in common; a folder beside this one adds a version, as `rwkv6` does.

version         the tables in which versions differ: parameters, and the arrays that the layers take
names           what files call the parameters, and how they become the official ones
state           what sequences carry from token to token
parameters      what a training changes: all parameters in one vector
config          what a config.json says besides
numpy_layers    layers in NumPy; `numba_layers` and `numba_loops` by Numba's loops; `cpu_layers` decides between them
grad            the loss and its gradients
model           the methods of a model: calls, states, text, files
"""
