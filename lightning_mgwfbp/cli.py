"""The command `lightning-mgwfbp`: argument parsing only.

`fit`, `validate`, `test` and `predict` are LightningCLI's own, model and data given by class_path;
every other command is a module with `add_arguments(parser)` and `run(arguments)`.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningCLI

from lightning_mgwfbp import bench, plan_command

LIGHTNING_COMMANDS = {
    "fit": "train a model (LightningCLI)",
    "validate": "evaluate a model on validation data (LightningCLI)",
    "test": "evaluate a model on test data (LightningCLI)",
    "predict": "run a model on data (LightningCLI)",
}
COMMANDS = {
    "bench": (bench, "time the link and fit alpha and beta"),
    "plan": (plan_command, "plan the merge groups of a saved profile, without training"),
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, since usage is what `--help` is for."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def lightning_cli(argv: Sequence[str] | None, **kwargs: Any) -> LightningCLI:
    """Run Lightning's own command line, any model and data; return what it built.

    Args:
        argv: None for this process's own, about which LightningCLI would warn if they were given.
        kwargs: further arguments of LightningCLI.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: a class_path is found where one is
    return LightningCLI(
        args=None if argv is None else list(argv),
        save_config_kwargs={"overwrite": True},
        subclass_mode_model=True,
        subclass_mode_data=True,
        **kwargs,
    )


def main(argv: Sequence[str] | None = None) -> int | None:
    """Run the command line `argv` (default: this process's own); exit code 2 for bad input."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in LIGHTNING_COMMANDS:
        lightning_cli(argv)
        return None
    parser = _Parser(prog="lightning-mgwfbp", description="Merged, overlapped gradient exchange.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in LIGHTNING_COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    arguments = parser.parse_args(words)
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its end
    except (OSError, ValueError) as error:
        arguments.parser.error(str(error))
    return None
