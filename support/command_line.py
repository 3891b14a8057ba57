"""Command lines: options from a dataclass, and errors of one line."""

import logging
import math
import re
import sys
import traceback
import warnings
from collections.abc import Callable

OUT_OF_MEMORY = (
    "out of memory on the device: lower --micro_batch_tokens or add --gradient_checkpointing, and"
    " continue with --resume (eval_aime.py: lower --batch_size). If that is not enough, lower"
    " --group_size or --max_new_tokens or train adapters (--lora_rank) in another --output_dir"
)


def parse(options_class: type, arguments: list[str] | None, description: str):
    """Return an instance of the options' dataclass from the command line.

    --help prints the description and every option with its default. Raises ValueError for an
    unknown option. Options cannot be abbreviated, because --rho for --rho0 would silently be
    another experiment.
    """
    from transformers import HfArgumentParser

    silence_libraries()
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--help" in arguments or "-h" in arguments:
        print(description)  # argparse would wrap its lines anew
    parser = HfArgumentParser(
        options_class, usage="%(prog)s [--OPTION VALUE ...]", allow_abbrev=False
    )
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise ValueError(f"{unknown[0]} is no option: --help lists them")
    return options_class(**vars(options))


def check_values(options, least: dict[str, float]) -> None:
    """Raise ValueError for a number below its least value or a missing device.

    Every value of a list counts. NaN and infinity are refused, too.
    """
    import torch

    for name, smallest in least.items():
        values = getattr(options, name)
        for value in values if isinstance(values, list) else [values]:
            if not smallest <= value < math.inf:
                raise ValueError(f"{name} must be finite and at least {smallest}, got {value}")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", options.device):
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {options.device!r}")
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device: torch does not see {options.device!r}") from error


def command(name: str, main: Callable[[], int], if_interrupted: str) -> None:
    """Run `main` as a script and exit with its status; print one line for what users can mend."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print(f"\n{if_interrupted}", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, RuntimeError) as error:  # also torch's OutOfMemoryError
        sys.exit(f"{name}: {explain(error)}")


def silence_libraries() -> None:
    """Turn off the progress bars and notes that would break the bar of the runs."""
    import transformers

    warnings.simplefilter("ignore", FutureWarning)  # of transformers and peft, for developers
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # a note for every retry
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def explain(error: BaseException) -> str:
    """Return one line for what users can mend, and a traceback for anything else."""
    if type(error).__name__ == "OutOfMemoryError":  # torch's
        return OUT_OF_MEMORY
    if isinstance(error, (ValueError, OSError, ArithmeticError)):
        return f"{error}"
    return "".join(traceback.format_exception(error))
