"""What a GPU would refuse, seen without one: tensors of two devices in one operation."""

from tiny import ROOT, command


def test_no_model_mixes_devices_and_a_step_is_looked_at_only_where_that_is_known():
    done = command("tests/support/fake_device.py", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "47 losses with gradients, 4 generations\n"
