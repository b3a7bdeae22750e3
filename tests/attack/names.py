"""Every property, and every name that the repr of an example uses."""

from calls import Call  # noqa: F401
from numpy import inf, nan  # noqa: F401
from operators import Split  # noqa: F401
from refusals import Bad, Shared  # noqa: F401
from tokens import Layer, Pipeline, Step  # noqa: F401
