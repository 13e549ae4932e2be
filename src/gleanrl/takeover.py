"""Importing this module runs an unchanged TorchRL program on gleanrl's data layer.

Either start the program by ``python -m gleanrl run train.py ARGUMENTS`` (or ``run -m package.module ARGUMENTS``), or
make this the first import of the program::

    import gleanrl.takeover

From then on `torchrl.collectors`, `torchrl.data` and `torchrl.envs`, with their submodules, give the program gleanrl's
classes under TorchRL's names. Names without a counterpart in gleanrl stay TorchRL's: losses, networks, trainers,
loggers, datasets and wrappers of simulators. TorchRL's own modules keep their own classes;
`gleanrl._takeover.import_hook` explains how. Names of other releases of TorchRL work if gleanrl serves them.

Processes that the program starts by `multiprocessing` are taken over, too. Programs that it starts by `subprocess`
aren't.

One line on stderr says so. Another one reports each name that stays TorchRL's when the program uses it.
``GLEANRL_TAKEOVER=report`` in the environment lists the served names, and adds a summary at the end of the program. It
lists the classes of both libraries that the program used, and where the main thread spent its time (200 samples a
second).

Raises:
    TakeoverError: if torchrl isn't installed, or has been imported before.
"""

from gleanrl._takeover.import_hook import install

install()
