#!/usr/bin/env python3
"""Shares arrays with NumPy (and PyTorch, where it is installed) through the module of examples/python, and trains with them.

usage: dlpack_check.py FOLDER   (that has the module)

Checks that nothing is copied, that memory lives as long as somebody uses it, and no longer, and that refusals are errors.
"""

import gc
import pathlib
import sys
import threading
import weakref

import numpy

sys.path.insert(0, sys.argv[1])
import chorus_python

GIB = 2 ** 30


def resident():
    """Bytes of memory that this process uses."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096


def refusal(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return str(error)
    raise AssertionError("nothing was refused")


class Watched(numpy.ndarray):
    """An array that can be referred to weakly."""


def check_sharing():
    array = numpy.zeros((2 ** 14, 2 ** 14), numpy.float32)  # 1 GiB, whose pages nobody has touched
    before = resident()
    there = chorus_python.Array(array)
    back = numpy.from_dlpack(there)
    assert back.nbytes == GIB and back.ctypes.data == array.ctypes.data and back.flags.writeable
    array[5, 7], back[-1, -1] = 3, 4
    assert back[5, 7] == 3 and array[-1, -1] == 4
    assert resident() - before < 32 << 20, f"{(resident() - before) >> 20} MiB were copied"
    part = numpy.from_dlpack(chorus_python.Array(array[3:9:2, 1:]))
    assert part.shape == (3, 2 ** 14 - 1) and part.strides == (8 * 2 ** 14, 4) and part[1, 6] == 3
    turned = numpy.from_dlpack(chorus_python.Array(array.T))
    assert turned[7, 5] == 3 and turned.ctypes.data == array.ctypes.data


def check_lifetimes():
    array = numpy.ones((4, 3), numpy.float32).view(Watched)
    gone = weakref.ref(array)
    there = chorus_python.Array(array)
    back = numpy.from_dlpack(there)
    del array, there
    gc.collect()
    assert gone() is not None and back.sum() == 12
    del back
    gc.collect()
    assert gone() is None, "the array is kept for ever"
    # Capsules that nobody takes, of both kinds.
    array = numpy.ones((4, 3), numpy.float32).view(Watched)
    gone, there = weakref.ref(array), chorus_python.Array(array)
    assert "dltensor_versioned" in repr(there.__dlpack__(max_version=(1, 0))) and '"dltensor"' in repr(there.__dlpack__())
    del array, there
    gc.collect()
    assert gone() is None, "a capsule that was not taken keeps the array"
    # The last user on another thread, without Python's lock.
    for _ in range(50):
        array = numpy.ones((4, 3), numpy.float32).view(Watched)
        gone, users = weakref.ref(array), [numpy.from_dlpack(chorus_python.Array(array))]
        del array
        thread = threading.Thread(target=users.clear)
        thread.start()
        thread.join()
        gc.collect()
        assert gone() is None


def check_refusals():
    array = numpy.ones((4, 3), numpy.float32)
    assert "expected F32, got F64" in refusal(chorus_python.Array, array.astype("float64"))
    assert "expected 2 axes, got 1" in refusal(chorus_python.Array, array[0])
    assert "expected strides of at least 0" in refusal(chorus_python.Array, array[::-1])
    assert "__dlpack__" in refusal(chorus_python.Array, [[1.0]])
    assert numpy.from_dlpack(chorus_python.Array(array[:0])).shape == (0, 3)
    array.flags.writeable = False
    lent = numpy.from_dlpack(chorus_python.Array(array))
    assert lent.shape == (4, 3) and not lent.flags.writeable


def check_training():
    random = numpy.random.default_rng(2)
    x = random.normal(size=(256, 5)).astype(numpy.float32)
    y = (x[:, 0] * x[:, 1] > 0).astype(numpy.int64)
    net = chorus_python.Classifier(5, 2)
    weight = numpy.from_dlpack(net.weight())
    assert weight.shape == (32, 5) and not weight.flags.writeable
    first = weight.copy()
    x.flags.writeable = False
    ticks, done = [0], threading.Event()

    def count():
        while not done.is_set():
            ticks[0] += 1
            done.wait(0.0001)

    thread = threading.Thread(target=count)
    thread.start()
    losses = net.fit(x, y, steps=300, lr=0.02)
    done.set()
    thread.join()
    assert ticks[0] > 5, "other threads waited for the training"
    right = (numpy.from_dlpack(net.logits(x)).argmax(1) == y).mean()
    assert len(losses) == 300 and losses[-1] < 0.3 * losses[0] and right > 0.95, (losses[0], losses[-1], right)
    assert (weight != first).any(), "the weights that NumPy sees are not those that were trained"
    assert "cross_entropy" in refusal(net.fit, x, y[:-1], 1)
    return losses[0], losses[-1], right


def check_torch():
    try:
        import torch
    except ImportError:
        return "PyTorch is not installed"
    large = torch.zeros(2 ** 14, 2 ** 14)
    before = resident()
    there = chorus_python.Array(large)
    back = torch.from_dlpack(there)
    assert back.data_ptr() == large.data_ptr() and resident() - before < 32 << 20
    back[2, 3] = 5
    assert large[2, 3] == 5
    del there, large
    assert back[2, 3] == 5
    assert "got BF16" in refusal(chorus_python.Array, torch.ones(2, 2, dtype=torch.bfloat16))
    net = chorus_python.Classifier(3, 2)
    assert torch.from_dlpack(net.weight()).shape == (32, 3)
    x = torch.randn(64, 3)
    losses = net.fit(x, (x[:, 0] > 0).long(), steps=100)
    assert losses[-1] < 0.5 * losses[0], losses
    return f"PyTorch {torch.__version__}: 1 GiB both ways without a copy"


check_sharing()
check_lifetimes()
check_refusals()
print("trained on NumPy's arrays: loss {:.3f} to {:.3f}, {:.1%} right".format(*check_training()))
print("NumPy: 1 GiB both ways without a copy;", check_torch())
