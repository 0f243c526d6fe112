"""`tests/tiny.py` under pytest: it is a script by name, so that it can run without any test framework."""

from tests.tiny import test_tiny as test_the_smallest_model_trains_in_half_its_memory_with_the_same_bits

__all__ = ["test_the_smallest_model_trains_in_half_its_memory_with_the_same_bits"]
