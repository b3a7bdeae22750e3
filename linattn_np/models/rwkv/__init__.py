"""What RWKV models of all versions have in common; the folders `rwkv6` and `rwkv7` beside this one add a version each.

version         the tables in which versions differ: parameters, and the arrays that the layers read
names           the parameters' names in files, and their conversion to the official names and shapes
state           the state that sequences carry from token to token
parameters      the layout of a trained model's parameters in one vector
config          what is read from a config.json
numpy_layers    layers in NumPy; `numba_layers` and `numba_loops`: in Numba's loops; `cpu_layers` chooses between them
grad            the loss and its gradients
model           the methods of a model: calls, states, text, files
"""
