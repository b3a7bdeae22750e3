"""Training with the operators in other frameworks: `interop.jax` and `interop.torch`, each importing its library.

Neither is imported by the rest of the package.
"""
