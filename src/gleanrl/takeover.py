"""Runs an unchanged TorchRL program on our data layer.

Either start it by ``python -m gleanrl run train.py ARGUMENTS`` (or ``run -m package.module ARGUMENTS``), or let this be
the first import of the program::

    import gleanrl.takeover

From then on `torchrl.collectors`, `torchrl.data` and `torchrl.envs`, with their submodules, give the program our
classes wherever we have one of that name, and torchrl's otherwise. Losses, networks, trainers, loggers, datasets and
wrappers of simulators stay torchrl's, and torchrl's own modules go on with their own classes:
`gleanrl._takeover.import_hook` says how. Names of other releases than the installed one work if they work here.

Processes that the program starts by `multiprocessing` are taken over, too; programs that it starts as such
(`subprocess`) aren't.

It says on stderr once which names are served, and names what stays torchrl's when the program takes it. With
``GLEANRL_TAKEOVER=report`` in the environment, it sums up at the end what ran on whose class, and where the main thread
spent the time (looked at 200 times a second).

Raises:
    TakeoverError: if torchrl isn't installed, or has been imported before.
"""

from gleanrl._takeover.import_hook import install

install()
