"""Support for programs written for other releases of TorchRL: their names, module paths and keywords.

The tables are in `names`, `moved` and `unserved`. `bind` applies them to a public module, `bind_unserved` adds the
errors for unserved names to any module, and `install` makes the other module paths importable.
"""

from gleanrl.compat.binding import absent, bind, bind_unserved
from gleanrl.compat.paths import install

__all__ = ["absent", "bind", "bind_unserved", "install"]
