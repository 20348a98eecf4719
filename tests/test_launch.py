"""What commands ask of the system before they work."""

from conftest import command


def test_the_memory_of_freed_tensors_is_kept():
    code = """
import sys, psutil, torch
from train.launch import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
x = [torch.ones(2**24) for _ in range(4)]
del x
print(psutil.Process().memory_info().rss)
"""
    kept, given_back = (int(command("-c", code, word).stdout) for word in ("keep", "no"))
    assert kept - given_back > 200_000_000
