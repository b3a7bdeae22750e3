"""Every property, and every name that the repr of an example uses."""

import numpy as np  # noqa: F401
from numpy import inf, nan  # noqa: F401

from attack.attention import Attention  # noqa: F401
from attack.calls import Call  # noqa: F401
from attack.endings import Ending  # noqa: F401
from attack.files import Batch, Brought, Damaged, Edit, Foreign, Npz, Vocabulary  # noqa: F401
from attack.frameworks import Lazy, Written  # noqa: F401
from attack.models import Copied, Drawing, Entering, Joining, Readers  # noqa: F401
from attack.operators import Split  # noqa: F401
from attack.process import Interrupted, Kept, LargeChunk, Saving, Together  # noqa: F401
from attack.refusals import Bad, Shared  # noqa: F401
from attack.tokens import Layer, Pipeline, Step  # noqa: F401
