"""What is alive when: the memory of a run."""

import gc
from collections import defaultdict

import pytest
import torch
from test_train import even_length, make_run, make_task
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from support import evaluation


# ---------------------------------------------------------------- what is alive when
class Alive(TorchDispatchMode):
    """Bytes of all tensors that any operator has seen and that are still alive."""

    def __init__(self):
        super().__init__()
        self.storages = {}  # address of the storage -> (weak reference, bytes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                storage = value.untyped_storage()
                entry = (StorageWeakRef(storage), storage.nbytes())
                self.storages[storage._cdata] = entry
        return result

    def bytes(self) -> int:
        self.storages = {
            address: entry for address, entry in self.storages.items() if not entry[0].expired()
        }
        return sum(size for _, size in self.storages.values())


def bytes_of(parameters) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["in full", "adapters"])
def test_weights_and_optimizer_states_are_all_that_lives_between_updates_and_nothing_between_runs(
    tmp_path, policy, monkeypatch, lora_rank
):
    """Kills: gradients or a graph that are kept while responses are drawn or log-probs recorded, a
    policy that is still there when its successor is loaded or evaluated.

    Two arms of two steps. Without the collector, which comes by when it likes.
    """
    if lora_rank:
        pytest.importorskip("peft")
    alive = Alive()
    measured = defaultdict(list)  # phase -> bytes that were alive when it began
    expected = {}  # phase -> bytes of weights, of trained weights

    def measure_before(module, name):
        function = getattr(module, name)

        def measured_function(*arguments, **others):
            measured[name].append(alive.bytes())
            return function(*arguments, **others)

        monkeypatch.setattr(module, name, measured_function)

    begin = train.begin

    def measured_begin(run):
        measured["begin"].append(alive.bytes())
        state = begin(run)
        trained = [p for p in state.policy.parameters() if p.requires_grad]
        expected["weights"] = bytes_of(state.policy.parameters())
        expected["trained"] = bytes_of(trained)
        return state

    adam_step = torch.optim.AdamW.step

    def measured_step(optimizer):
        measured["step"].append(alive.bytes())
        return adam_step(optimizer)

    monkeypatch.setattr(train, "begin", measured_begin)
    monkeypatch.setattr(torch.optim.AdamW, "step", measured_step)
    for module, name in (
        (train, "draw"),
        (train, "record"),
        (train, "update_policy"),
        (train, "evaluate_policy"),
        (evaluation, "evaluate"),
    ):
        measure_before(module, name)
    gc.collect()
    gc.disable()
    try:
        with alive:
            for arm in ("bapo@2", "grpo@2"):
                run = make_run(
                    tmp_path / arm,
                    policy,
                    method=arm,
                    lora_rank=lora_rank,
                    steps=2,
                    max_new_tokens=5,
                    checkpoint_every=10,
                )
                run.folder.mkdir()
                task = make_task(even_length)
                train.carry_out(run, task._replace(held_out=task.held_out[:1]))
    finally:
        gc.enable()

    weights = expected["weights"]
    trained = expected["trained"]
    # Rollouts and their micro-batches; of a model of this size they are no small part.
    others = 0.15 * weights if not lora_rank else 0.25 * weights
    levels = {
        "begin": [0, 0],
        "draw": [weights, weights + 2 * trained] * 2,
        "record": [weights, weights + 2 * trained] * 2,
        "evaluate_policy": [0, 0],
        "evaluate": [weights, weights],
    }
    levels["update_policy"] = [weights, *[weights + 2 * trained] * 3] * 2
    levels["step"] = [weights + trained, *[weights + 3 * trained] * 3] * 2
    for phase, least in levels.items():
        assert len(measured[phase]) == len(least), phase
        for found, level in zip(measured[phase], least):
            assert level <= found < level + others, (phase, found / weights)
