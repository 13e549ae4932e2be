"""Programs written for other releases of this API: second names, other paths, older keywords, names not served.

The tables stand in `names`; `bind` puts them into a public module, `install` makes the other paths importable, and
`spelling` does the keywords of constructors.
"""

from gleanrl.compat.binding import bind
from gleanrl.compat.paths import install

__all__ = ["bind", "install"]
