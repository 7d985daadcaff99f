from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import _dynamo
from torch._dynamo.utils import counters


@contextmanager
def compiler_as_before() -> Iterator[None]:
    """Whoever compiles, seals or changes the compiler's settings inside leaves no trace."""
    precision = torch.get_float32_matmul_precision()
    is_deterministic = torch.backends.cudnn.deterministic
    with _dynamo.config.patch():
        _dynamo.reset()
        counters.clear()
        yield
    torch.compiler.set_stance("default")
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.deterministic = is_deterministic
    _dynamo.reset()
    counters.clear()


@pytest.fixture
def compiling():
    """The test compiles, seals or changes the compiler's settings: afterwards all is as before."""
    with compiler_as_before():
        yield
