"""What the benchmarks time with."""

import statistics
import time

import torch


def clock(device: str) -> float:
    """Seconds, once the device has done its work."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def paired_medians(functions: list, repeats: int, device: str = "cpu") -> list[float]:
    """Seconds of each function; they take turns, so that a drift of the machine's speed hits all of them."""
    times = [[] for _ in functions]
    for turn in range(repeats + 1):
        for function, of_function in zip(functions, times):
            start = clock(device)
            function()
            if turn:  # the first warms up
                of_function.append(clock(device) - start)
    return [statistics.median(of_function) for of_function in times]
