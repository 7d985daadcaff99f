"""What the decoder works out in fp32 although its activations are bf16."""

import torch

from worker.nn.decoder import rotary_table, rotate


def heads(n):
    return torch.randn(1, n, 2, 128, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_heads_are_turned_in_fp32_and_rounded_once():
    """Angles of 40 000 radians: their cosines in bf16 would be off in every head."""
    x = heads(50)
    cos, sin = rotary_table(torch.arange(40_000, 40_050)[None], 128, 1e6)

    turned = rotate(x, cos, sin)

    assert torch.equal(turned, rotate(x.float(), cos, sin).bfloat16())


def test_the_angle_of_a_far_position_is_its_own():
    """In bf16 positions from 256 on would share their angles, in fp16 those from 2048 on."""
    positions = torch.tensor([[40_958, 40_959]])
    cos, sin = rotary_table(positions, 128, 1e6)

    exact = positions[..., None].double() * 1e6 ** (-torch.arange(0, 128, 2).double() / 128)

    torch.testing.assert_close(cos[0, :, 0, :64].double(), exact[0].cos(), rtol=0, atol=6e-3)
    torch.testing.assert_close(sin[0, :, 0, 64:].double(), exact[0].sin(), rtol=0, atol=6e-3)
