"""launch.py's short way to a compiled kernel, with a kernel and a driver that only take notes: what a kernel was
compiled for goes straight to it, and whatever else Triton compiles for goes through Triton."""

import contextlib
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from sonicmoe_hf.kernels.announce import LOCAL_RANKS, QUIET
from sonicmoe_hf.kernels.triton import launch
from sonicmoe_hf.kernels.triton.launch import launch_kernel

pytestmark = pytest.mark.pinned
ADDRESS = 4096
STREAM = 7


class Pointer(NamedTuple):
    """A tensor as a launch sees one."""

    dtype: torch.dtype = torch.bfloat16
    device: int = 0
    address: int = ADDRESS
    is_meta = False

    def data_ptr(self):
        return self.address

    def get_device(self):
        return self.device


class Kernel:
    """A JITFunction that notes what Triton is asked to launch (`by_triton`) and what is launched
    straight (`straight`)."""

    __name__ = "kernel"

    def __init__(self, num_tensors=2, specialised=False):
        self.by_triton, self.straight = [], []
        numbers = SimpleNamespace(do_not_specialize=not specialised)
        self.params = [SimpleNamespace(do_not_specialize=False)] * num_tensors + [numbers]

    def __getitem__(self, grid):
        def launch_by_triton(*arguments, **options):
            self.by_triton.append((grid, *arguments, options))
            return SimpleNamespace(run=self.run, function="function", packed_metadata="metadata")

        return launch_by_triton

    def run(self, *arguments):
        self.straight.append(arguments)


@pytest.fixture(autouse=True)
def _fakes(monkeypatch):
    monkeypatch.setattr(launch, "JITFunction", Kernel)
    monkeypatch.setattr(launch, "_COMPILED", {})
    monkeypatch.setattr(
        launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: STREAM))
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())


def ask(kernel, tensors, numbers=(5,), constants=(64,), num_warps=4):
    return launch_kernel(kernel, (3, 2), tensors, numbers, constants, num_warps=num_warps)


def test_what_a_kernel_was_compiled_for_goes_straight_to_it():
    kernel = Kernel()
    ask(kernel, (Pointer(), Pointer(address=ADDRESS + 16)))
    ask(kernel, (Pointer(address=2 * ADDRESS), Pointer()), numbers=(6,))
    assert len(kernel.by_triton) == 1
    expected = (3, 2, 1, STREAM, "function", "metadata", None, None, None, 2 * ADDRESS, ADDRESS, 6, 64)
    assert kernel.straight == [expected]


OTHERS = {
    "dtype": {"tensors": (Pointer(), Pointer(torch.float16))},
    "device": {"tensors": (Pointer(device=1), Pointer(torch.float32, device=1))},
    "None": {"tensors": (Pointer(), None)},
    "constant": {"constants": (128,)},
    "option": {"num_warps": 8},
}


@pytest.mark.parametrize("change", OTHERS)
def test_a_kernel_is_compiled_anew_for_another(change):
    kernel, usual = Kernel(), {"tensors": (Pointer(), Pointer(torch.float32))}
    for _ in range(2):
        ask(kernel, **usual)
        ask(kernel, **usual | OTHERS[change])
    assert len(kernel.by_triton) == 2, "once as usual, once as changed"
    assert len(kernel.straight) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": (Pointer(), Pointer(address=ADDRESS + 8))},
        {"tensors": (Pointer(address=ADDRESS + 2), Pointer())},
        {"numbers": (1 << 31,)},
    ],
    ids=["8 bytes", "2 bytes", "64-bit number"],
)
def test_triton_launches_what_it_compiles_on_its_own(change):
    kernel, usual = Kernel(), {"tensors": (Pointer(), Pointer())}
    ask(kernel, **usual)
    for _ in range(2):
        ask(kernel, **usual | change)
    assert len(kernel.by_triton) == 3 and not kernel.straight
    ask(kernel, **usual, numbers=((1 << 31) - 1,))
    assert len(kernel.straight) == 1, "the largest of 32 bits"


def test_a_descriptor_is_compiled_for_by_its_dtype_and_block():
    kernel = Kernel(1)
    for dtype, block in ((torch.float32, 16), (torch.float32, 32), (torch.float16, 16), (torch.float32, 16)):
        ask(kernel, (TensorDescriptor.from_tensor(torch.empty(64, 64, dtype=dtype), [8, block]),))
    assert len(kernel.by_triton) == 3 and len(kernel.straight) == 1


def test_a_number_that_triton_would_compile_for_is_refused():
    with pytest.raises(ValueError, match="kernel must name its numbers in do_not_specialize"):
        ask(Kernel(specialised=True), (Pointer(), Pointer()))


def test_a_launch_makes_its_device_the_current_one(monkeypatch):
    entered = []

    @contextlib.contextmanager
    def device(index):
        entered.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    kernel = Kernel()
    for index in (0, 1):
        ask(kernel, (Pointer(device=index), Pointer(device=index)))
    assert entered == [1] and len(kernel.by_triton) == 2


def test_a_profilers_hooks_hear_of_every_launch(monkeypatch):
    kernel, heard = Kernel(), []
    monkeypatch.setattr(launch.knobs.runtime.launch_enter_hook, "calls", [print])
    ask(kernel, (Pointer(), Pointer()))

    class Compiled(SimpleNamespace):
        def __getitem__(self, grid):
            return lambda *arguments, stream: heard.append((grid, arguments, stream))

    ((key, launchable),) = launch._COMPILED.items()
    launch._COMPILED[key] = Compiled(), *launchable[1:]
    ask(kernel, (Pointer(), Pointer()))
    assert heard == [((3, 2, 1), (ADDRESS, ADDRESS, 5, 64), STREAM)] and not kernel.straight


def test_that_triton_compiles_is_said_once_when_it_has_taken_a_second(monkeypatch, capsys):
    monkeypatch.delenv(QUIET, raising=False)
    for name in LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    clock = iter(step / 2 for step in range(100))  # each compilation takes half a second
    monkeypatch.setattr(launch.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(launch, "_compile_time", launch._CompileTime())
    said = []
    for constant in (32, 64, 128, 64):
        ask(Kernel(), (Pointer(), Pointer()), constants=(constant,))
        said.append("Triton is compiling kernels" in capsys.readouterr().err)
    assert said == [False, True, False, False]
