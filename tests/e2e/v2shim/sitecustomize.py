"""Changes what an engine runs as, for tests only.

Python imports this module at start-up when its folder is on PYTHONPATH, so that every process of an engine has it.
``LLM_STEER_SHIM`` names what to change, separated by commas; ``v2`` if it is not set:

* ``v2``: Model Runner V2 on a CPU. Triton lists a CPU backend and runs kernels in its interpreter: slow, but the code of
  V2 itself is the real one.
* ``async``: asynchronous scheduling, which vLLM turns off on a CPU.
* ``sleep``: sleep mode, which vLLM has on GPUs alone. What is allocated in its pool of weights is overwritten in a sleep of
  level 2.
* ``hide``: this project's entry points do not exist: vLLM without the plugin.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys

ON = os.environ.get("LLM_STEER_SHIM", "v2").split(",")
EDITS = {}


class _Edits(importlib.abc.MetaPathFinder):
    """Changes a module right after it is loaded."""

    searching = False

    def find_spec(self, name, path=None, target=None):
        if name not in EDITS or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
        finally:
            self.searching = False
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            EDITS[name](module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Edits())


def _add_cpu_backend(backends):
    driver = type("Driver", (), {"is_active": staticmethod(lambda: True)})
    backends.backends.setdefault("cpu", type("Backend", (), {"driver": driver, "compiler": None}))


def _schedule_asynchronously(cpu):
    original = cpu.CpuPlatform.__dict__["check_and_update_config"].__func__

    def check_and_update_config(cls, vllm_config):
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    cpu.CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _take_any_mask(interpreter):
    """The interpreter wants masks of booleans, where kernels compiled for a device take integers."""
    builder = interpreter.InterpreterBuilder

    def take_any(name, at):
        original = getattr(builder, name)

        def masked(self, *args):
            args[at].data = args[at].data.astype(bool)
            return original(self, *args)

        setattr(builder, name, masked)

    take_any("create_masked_load", at=1)
    take_any("create_masked_store", at=2)


def _truncate_in_torch(sampler):
    sampler.HAS_TRITON = False  # the interpreter trips over the kernel for top-k and top-p


if "v2" in ON:
    os.environ["TRITON_INTERPRET"] = "1"
    EDITS["triton.backends"] = _add_cpu_backend
    EDITS["triton.runtime.interpreter"] = _take_any_mask
    EDITS["vllm.v1.sample.ops.topk_topp_sampler"] = _truncate_in_torch

if "async" in ON:
    EDITS["vllm.platforms.cpu"] = _schedule_asynchronously


def _sleep_on_cpus(worker):
    import contextlib
    import inspect

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    held, lost = {}, []

    def storages(tree):
        return {t.untyped_storage().data_ptr(): t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)}

    def steering():
        """This project's code is at work, other than around vLLM's own loading."""
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_globals.get("__name__", "").startswith("llm_steer.") and frame.f_code.co_name != "load_model":
                return True
            frame = frame.f_back
        return False

    class Pool(TorchDispatchMode):
        """Remembers what is allocated while it is open."""

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result, given = function(*args, **(kwargs or {})), storages((args, kwargs))
            for number, tensor in storages(result).items():
                if number not in given and steering():
                    lost.append(tensor)
                elif number not in given:
                    held[number] = tensor
            return result

    def _maybe_get_memory_pool_context(self, tag):
        return Pool() if tag == "weights" else contextlib.nullcontext()

    def sleep(self, level=1):
        assert level == 2
        self.saved = [(t, t.untyped_storage().clone()) for t in held.values()]
        for tensor in (*held.values(), *lost):
            tensor.untyped_storage().fill_(0x3C)  # 0.01, since what is not a number would stay in the cache of keys

    def wake_up(self, tags=None):
        """What was lost stays lost."""

    def reload_weights(self):
        """Everything of vLLM's: its own does not bring back what was packed for CPUs."""
        for tensor, content in self.saved:
            tensor.untyped_storage().copy_(content)

    for method in (_maybe_get_memory_pool_context, sleep, wake_up, reload_weights):
        setattr(worker.CPUWorker, method.__name__, method)


def _allow_sleep(cpu):
    cpu.CpuPlatform.is_sleep_mode_available = lambda self: True


if "sleep" in ON:
    EDITS["vllm.v1.worker.cpu_worker"] = _sleep_on_cpus
    EDITS["vllm.platforms.cpu"] = _allow_sleep

if "hide" in ON:
    _entry_points = importlib.metadata.entry_points

    def entry_points(**params):
        found = _entry_points(**params)
        if not isinstance(found, importlib.metadata.EntryPoints):  # before Python 3.12, without a group: a mapping
            return found
        return type(found)(e for e in found if not e.value.startswith("llm_steer."))

    importlib.metadata.entry_points = entry_points
