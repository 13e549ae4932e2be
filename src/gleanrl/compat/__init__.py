"""Programs written for other releases of this API: second names, other paths, older keywords, names not served.

The tables are in `names`, `unserved` and `members`. `bind` puts them into a public module, `bind_unserved` into any
module, and `install` makes the other paths importable. `keywords` checks the keywords of constructors.
"""

from gleanrl.compat.binding import absent, bind, bind_unserved
from gleanrl.compat.paths import install

__all__ = ["absent", "bind", "bind_unserved", "install"]
