"""Tensors of two devices in one operation fail without a GPU too, on a fake device."""

from tiny import ROOT, command


def test_no_model_mixes_devices_or_synchronises_unexpectedly():
    done = command("tests/support/fake_device.py", PYTHONPATH=str(ROOT))
    assert done.stdout == "56 losses with gradients, 4 generations\n"
