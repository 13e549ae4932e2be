"""Data sets of other formats as buffers, and TorchRL's classes for them.

The package has no ``__all__``: a program under takeover keeps TorchRL's own data sets, which can download.
"""

from gleanrl.compat import bind_unserved
from gleanrl.compat.binding import check_keywords
from gleanrl.data.datasets.conversion import from_arrays as from_arrays
from gleanrl.data.datasets.hdf5 import D4RLExperienceReplay as D4RLExperienceReplay
from gleanrl.data.datasets.hdf5 import from_hdf5 as from_hdf5
from gleanrl.data.datasets.minari import MinariExperienceReplay as MinariExperienceReplay
from gleanrl.data.datasets.minari import from_minari as from_minari
from gleanrl.data.datasets.parquet import from_lerobot as from_lerobot
from gleanrl.data.datasets.parquet import from_parquet as from_parquet

check_keywords(D4RLExperienceReplay)
check_keywords(MinariExperienceReplay)
bind_unserved(__name__, globals())
