"""The command line.

``python -m gleanrl run [-m] PROGRAM ARGUMENTS`` runs a TorchRL program; see `gleanrl.takeover`.
``python -m gleanrl export SOURCE --to FORMAT`` writes stored records in another format.
``python -m gleanrl show SOURCE`` prints a summary of stored records, or writes a page about them.
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from gleanrl._takeover.import_hook import install
from gleanrl.errors import GleanError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line: parse the arguments, and carry out the command.

    ``run`` installs the import hook, and runs the program in this process. It changes `sys.argv`, and `sys.path` as
    Python itself would for the program. Errors of the program pass through.

    Raises:
        SystemExit: the command line is wrong, the program's file doesn't exist, or stored records can't be read or
            exported.
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
    records = argparse.ArgumentParser(add_help=False)
    records.add_argument(
        "source", metavar="SOURCE", help="a checkpoint, an HDF5 or Parquet file, or a data set"
    )
    records.add_argument("--part", metavar="NAME", help="the buffer in a checkpoint of several parts")
    export = commands.add_parser(
        "export", parents=[records], help="write stored records in a format of other programs"
    )
    export.add_argument("--to", required=True, metavar="FORMAT", help="hdf5, minari, parquet or safetensors")
    export.add_argument("--out", metavar="PATH", help="a new file or folder, or the id of a Minari data set")
    show = commands.add_parser("show", parents=[records], help="look at stored records")
    show.add_argument("--html", metavar="FILE", help="write a page that a browser opens without a network")
    show.add_argument(
        "--summary",
        action="store_true",
        help="print keys, statistics of episodes, and problems (default without --html)",
    )
    given = parser.parse_args(arguments)
    if "to" in given:
        _export(export, given)
        return
    if "source" in given:
        _show(show, given)
        return
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


def _export(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    # `run` has to install its hook before any part of the library is imported, so the import is here.
    opening = importlib.import_module("gleanrl.data.datasets.opening")
    try:
        print(opening.export(arguments.source, arguments.to, arguments.out, arguments.part))
    except (GleanError, OSError) as error:
        parser.exit(1, f"export: {error}\n")


def _show(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    looking = importlib.import_module("gleanrl.data.datasets.show")
    try:
        summary = looking.show(arguments.source, arguments.part, arguments.html)
        if arguments.html is not None:
            print(f"wrote {arguments.html}, {Path(arguments.html).stat().st_size / 1e6:.2f} MB")
        if arguments.summary or arguments.html is None:
            print(summary)
    except (GleanError, OSError) as error:
        parser.exit(2, f"show: {error}\n")


if __name__ == "__main__":
    main()
