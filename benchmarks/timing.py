"""What the benchmarks measure with."""

import platform
import resource
import statistics
import time
import warnings

import torch
import transformers


def clock(device: str) -> float:
    """Seconds, once the device has done its work; on a CPU of processor time, which other processes hardly change."""
    if device == "cpu":
        return time.process_time()
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


def peak_gib(device: str) -> float:
    """Largest memory since the last call, of the GPU's allocator; of the process so far on a CPU."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak / 2**30


def host_waits(device: str, function) -> int | None:
    """How often the function makes the host wait for the GPU; None on a CPU."""
    if device == "cpu":
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        function()
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def about(device: str) -> dict[str, str]:
    """What was measured on."""
    name = f"{platform.machine()}, one thread" if device == "cpu" else torch.cuda.get_device_name(device)
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}
