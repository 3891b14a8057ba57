"""Command lines: options from a dataclass, and errors of one line."""

import inspect
import logging
import math
import re
import sys
import warnings
from argparse import ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Callable


class HelpFormatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Print defaults, and the lines of the description as they are."""


def parse(options_class: type, arguments: list[str] | None, description: str):
    """Return an instance of the options' dataclass from the command line.

    The string below a field of the class is its help, so that the class reads well. Options cannot
    be abbreviated, because --rho for --rho0 would silently be another experiment.
    """
    from transformers import HfArgumentParser

    silence_libraries()
    parser = HfArgumentParser(
        options_class,
        usage="%(prog)s [--OPTION VALUE ...]",
        description=description,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    source = inspect.getsource(options_class)
    texts = dict(re.findall(r'\n    (\w+): .*\n    """([^"]*)"""', source))
    for action in parser._actions:
        action.help = texts.get(action.dest, action.help)
    # An unknown option ends here, before the class finds that another one is missing.
    return options_class(**vars(parser.parse_args(arguments)))


def check_values(options, least: dict[str, float]) -> None:
    """Raise ValueError for a number below its least value, for NaN and infinity, and for a device
    that torch does not have.
    """
    import torch

    for name, smallest in least.items():
        value = getattr(options, name)
        if not smallest <= value < math.inf:
            raise ValueError(f"{name} must be finite and at least {smallest}, got {value}")
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device must be cpu, cuda or cuda:N of a GPU that torch finds, got {options.device!r}"
            f" ({error})"
        ) from error


def command(name: str, main: Callable[[], int], if_interrupted: str) -> None:
    """Run `main` as a script and exit with its status; print one line for what users can fix."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print(f"\n{if_interrupted}", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError) as error:
        sys.exit(f"{name}: {error}")


def silence_libraries() -> None:
    """Turn off the progress bars and notes that would break the bar of the runs."""
    import transformers

    warnings.simplefilter("ignore", FutureWarning)  # of transformers and peft, for developers
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # a note for every retry
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
