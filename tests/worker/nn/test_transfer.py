"""Bytes on their way to the device."""

import numpy as np
import pytest
import torch

from worker.nn.transfer import Staging

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 16, 100])
def test_any_number_of_bytes_arrives_in_pieces(n):
    staging = Staging(DEVICE, side_bytes=8, n_sides=2)
    for seed in range(3):
        values = np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)
        target = torch.full((n + 3,), 9, dtype=torch.uint8, device=DEVICE)

        staging.send(values, target)

        assert target.tolist() == [*values.tolist(), 9, 9, 9]


def test_an_array_may_change_once_it_is_sent_and_parts_of_arrays_are_taken():
    staging = Staging(DEVICE, side_bytes=4, n_sides=2)
    whole = np.arange(24, dtype=np.uint8).reshape(4, 6)
    part = whole[1:3, 2:5]
    wanted = part.flatten().tolist()
    target = torch.zeros(6, dtype=torch.uint8, device=DEVICE)

    staging.send(part, target)
    whole[:] = 0

    assert target.tolist() == wanted


def test_read_only_arrays_are_taken():
    values = np.arange(5, dtype=np.uint8)
    values.flags.writeable = False
    target = torch.zeros(5, dtype=torch.uint8, device=DEVICE)

    Staging(DEVICE, side_bytes=4, n_sides=2).send(values, target)

    assert target.tolist() == [0, 1, 2, 3, 4]
