"""Array types. A step over 256 requests costs a few numpy operations, not thousands of Python ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

NONE: IntArray = np.zeros(0, dtype=np.int64)
