"""The command line: ``python -m gleanrl run [-m] PROGRAM ARGUMENTS`` runs a TorchRL program; see `gleanrl.takeover`."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from gleanrl._takeover.import_hook import install


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line: parse the arguments, install the import hook, and run the program in this process.

    The call changes `sys.argv`, and `sys.path` as Python itself would for the program. Errors of the program pass
    through.

    Raises:
        SystemExit: the command line is wrong, or the program's file doesn't exist.
        TakeoverError: TorchRL isn't installed, or was imported before; see `gleanrl.takeover`.
    """
    parser = argparse.ArgumentParser(prog="python -m gleanrl")
    commands = parser.add_subparsers(metavar="COMMAND")
    run = commands.add_parser(
        "run", help="run a TorchRL program, unchanged, with our data layer behind its imports"
    )
    run.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is the name of a module")
    run.add_argument("program", metavar="PROGRAM", help="a Python file, or a module with -m")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="the program's own")
    given = parser.parse_args(arguments)
    if "program" not in given:
        parser.print_help(sys.stderr)
        parser.exit(2)
    if not given.is_module and not Path(given.program).exists():
        parser.error(f"run: there is no file {given.program}")
    install()
    sys.argv[:] = [given.program, *given.arguments]
    if given.is_module:
        runpy.run_module(given.program, run_name="__main__", alter_sys=True)
    else:
        if not (
            sys.flags.isolated or getattr(sys.flags, "safe_path", False)
        ):  # -I and -P put no directory first
            sys.path[0] = str(Path(given.program).resolve().parent)
        runpy.run_path(given.program, run_name="__main__")


if __name__ == "__main__":
    main()
