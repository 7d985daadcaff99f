"""HiFT: mel frames -> 24 kHz samples, by a harmonic source, a filter network and a short ISTFT.

Written from the paper (Li et al. 2023, "HiFTNet: A Fast High-Quality Neural Vocoder with
Harmonic-plus-Noise Filter and Inverse Short Time Fourier Transform") and the MiniCPM-o 4.5
reference, which has two generations of it: the legacy net looks to both sides, the causal one to
the left and a few mel frames ahead. They share this module; `HiftConfig.is_causal` picks the
padding, the way of upsampling and the shape of the sine waves.

Differences from the reference: weight norm is folded into the weights, both transforms are
convolutions with a DFT basis (any dtype, no complex numbers), and F0 and phase are in fp64 in both
generations (the reference's older one has them in fp32).

A row of a batch may have begun in the middle of its window: `start` says how many leading frames
do not belong to it. They may hold anything, even NaN; to the layers it looks as if the window
began there. So rows of different progress share one call of one shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.nn.hift_blocks import (
    POINTWISE,
    PaddedConv,
    ResBlock,
    Upsample,
    before,
    blank,
    same_padding,
)

WHOLE_HOP = 480
"""Samples of a mel frame: 24 kHz / 50 Hz. What tensor shapes alone do not tell."""
SOURCE_SLOPE = 0.01
"""Slope of the last leaky ReLU, where the published code keeps PyTorch's default."""
MAX_MAGNITUDE = 100.0


@dataclass(frozen=True, slots=True)
class HiftConfig:
    """Sizes of the net; the defaults are those of the published files."""

    is_causal: bool
    n_mels: int = 80
    base_channels: int = 512
    n_overtones: int = 8
    sample_rate_hz: int = 24_000
    sine_amplitude: float = 0.1
    noise_std: float = 0.003
    voiced_threshold_hz: float = 10.0
    upsample_rates: tuple[int, ...] = (8, 5, 3)
    upsample_kernels: tuple[int, ...] = (16, 11, 7)
    n_fft: int = 16
    fft_hop: int = 4
    block_kernels: tuple[int, ...] = (3, 7, 11)
    block_dilations: tuple[tuple[int, ...], ...] = ((1, 3, 5),) * 3
    source_kernels: tuple[int, ...] = (7, 7, 11)
    source_dilations: tuple[tuple[int, ...], ...] = ((1, 3, 5),) * 3
    slope: float = 0.1
    audio_limit: float = 0.99
    pre_kernel: int = 7
    """Legacy: width of the first convolution."""
    look_right: int = 4
    """Causal: mel frames that the first convolution looks ahead."""
    f0_channels: int = 512
    f0_look_right: int = 3
    """Causal: mel frames that the F0 predictor looks ahead."""

    @property
    def columns(self) -> int:
        """STFT columns of a mel frame."""
        return math.prod(self.upsample_rates)

    @property
    def hop(self) -> int:
        """Samples of a mel frame."""
        return self.columns * self.fft_hop

    @property
    def n_harmonics(self) -> int:
        return self.n_overtones + 1

    @property
    def n_bins(self) -> int:
        return self.n_fft // 2 + 1

    def channels(self, stage: int) -> int:
        """Width behind upsampling stage `stage` (-1: before the first)."""
        return self.base_channels // 2 ** (stage + 1)

    def source_stride(self, stage: int) -> int:
        """STFT columns that become one position of a stage."""
        return math.prod(self.upsample_rates[stage + 1 :])


def legacy_config(source: Mapping[str, Tensor]) -> HiftConfig:
    """Return the sizes of a legacy net, which comes without a configuration file.

    Args:
        source: state dict of `hift.pt` or `hift_original.pt`.

    Raises:
        KeyError: a tensor is missing.
        ValueError: the sizes are none that a legacy net can have.
    """
    plain = _plain_names(source)

    def kernel(name: str) -> int:
        tensor = plain.get(f"{name}.parametrizations.weight.original1")
        return (plain[f"{name}.weight"] if tensor is None else tensor).shape[-1]

    first = plain["conv_pre.parametrizations.weight.original1"]
    n_stages = _count(plain, "ups")
    n_fft = plain["conv_post.bias"].shape[0] - 2
    # A source convolution is twice as wide as its stride, the last one is 1 wide.
    strides = [max(1, kernel(f"source_downs.{i}") // 2) for i in range(n_stages)]
    later = [strides[i] // strides[i + 1] for i in range(n_stages - 1)]
    rates = (WHOLE_HOP // (n_fft // 4 * strides[0]), *later)
    if math.prod(rates) * (n_fft // 4) != WHOLE_HOP:
        raise ValueError(f"hift: upsampling {rates}, {n_fft}-point FFT: no {WHOLE_HOP} samples")
    n_kernels = _count(plain, "resblocks") // n_stages
    n_dilations = _count(plain, "resblocks.0.convs1")
    dilations = tuple(range(1, 2 * n_dilations, 2))  # 1, 3, 5
    return HiftConfig(
        is_causal=False,
        n_mels=first.shape[1],
        base_channels=first.shape[0],
        n_overtones=plain["m_source.l_linear.weight"].shape[1] - 1,
        upsample_rates=rates,
        upsample_kernels=tuple(kernel(f"ups.{i}") for i in range(n_stages)),
        n_fft=n_fft,
        fft_hop=n_fft // 4,
        block_kernels=tuple(kernel(f"resblocks.{i}.convs1.0") for i in range(n_kernels)),
        block_dilations=(dilations,) * n_kernels,
        source_kernels=tuple(kernel(f"source_resblocks.{i}.convs1.0") for i in range(n_stages)),
        source_dilations=(dilations,) * n_stages,
        pre_kernel=first.shape[2],
        f0_channels=plain["f0_predictor.classifier.weight"].shape[1],
    )


class F0Predictor(nn.Module):
    """Five convolutions and a linear layer: the fundamental frequency of every frame."""

    N_LAYERS = 5

    def __init__(self, config: HiftConfig) -> None:
        super().__init__()
        width, causal = config.f0_channels, config.is_causal
        first = config.f0_look_right + 1 if causal else 3
        padding = (0, 0) if causal else same_padding(first, 1, False)
        later = same_padding(3, 1, causal)
        self.look_right = config.f0_look_right if causal else 0
        self.convs = nn.ModuleList(
            PaddedConv(width, width, 3, later)
            if i
            else PaddedConv(config.n_mels, width, first, padding)
            for i in range(self.N_LAYERS)
        )
        self.out = nn.Linear(width, 1)

    @property
    def history(self) -> int:
        """Frames before a frame that its F0 depends on (causal)."""
        return 2 * (self.N_LAYERS - 1)

    def forward(self, mel: Tensor, start: Tensor | None = None, is_final: bool = True) -> Tensor:
        """Return F0 in Hz, `[B, F]`, in the dtype of the weights; 0 before `start`.

        Causal: unless `is_final`, the last `look_right` frames are only looked at.
        """
        x = mel.to(self.out.weight.dtype)
        x = blank(x, before(start, 1, x.shape[2]))
        if is_final and self.look_right:
            x = functional.pad(x, (0, self.look_right))
        dead = before(start, 1, x.shape[2] - self.look_right)
        for conv in self.convs:
            x = blank(functional.elu(conv(x)), dead)
        f0 = self.out(x.transpose(1, 2))[..., 0].abs()
        return f0 if dead is None else f0.masked_fill(dead[:, 0], 0.0)


class Hift(nn.Module):
    """The net. Stateless: the vocoders keep what lies between two chunks."""

    stft_basis: Tensor
    istft_basis: Tensor
    window_power: Tensor

    def __init__(self, config: HiftConfig) -> None:
        super().__init__()
        self.config = config
        causal, n_stages = config.is_causal, len(config.upsample_rates)
        wide = config.channels(-1)
        self.conv_pre = (
            PaddedConv(config.n_mels, wide, config.look_right + 1, (0, 0))
            if causal
            else PaddedConv(
                config.n_mels, wide, config.pre_kernel, same_padding(config.pre_kernel, 1, False)
            )
        )
        self.ups = nn.ModuleList(_upsampler(config, i) for i in range(n_stages))
        self.source_downs = nn.ModuleList(_source_down(config, i) for i in range(n_stages))
        self.source_blocks = nn.ModuleList(
            ResBlock(
                config.channels(i), config.source_kernels[i], config.source_dilations[i], causal
            )
            for i in range(n_stages)
        )
        self.blocks = nn.ModuleList(
            ResBlock(config.channels(i), kernel, dilations, causal)
            for i in range(n_stages)
            for kernel, dilations in zip(config.block_kernels, config.block_dilations, strict=True)
        )
        self.conv_post = PaddedConv(
            config.channels(n_stages - 1), 2 * config.n_bins, 7, same_padding(7, 1, causal)
        )
        self.merge = nn.Linear(config.n_harmonics, 1)
        self.f0 = F0Predictor(config)
        for name, tensor in transform_tables(config).items():
            self.register_buffer(name, tensor)
        self.stream_calls = list(POINTWISE)
        """For chunks, where `start` is given; compiled regions take their places."""

    def turns(self, f0: Tensor) -> Tensor:
        """Return how many turns each harmonic makes in each frame, fp64 `[B, F, H]`."""
        order = torch.arange(1, self.config.n_harmonics + 1, device=f0.device)
        per_hz = self.config.hop / self.config.sample_rate_hz
        return f0.double()[..., None] * order * per_hz

    def source(self, f0: Tensor, sines: Tensor, noise: Tensor) -> Tensor:
        """Mix harmonics and noise into the source signal `[B, 1, n]`.

        Args:
            f0: Hz, `[B, F]`.
            sines: the harmonics, each of size 1, `[B, n, H]`.
            noise: `[B, n, H]`.
        """
        config = self.config
        voiced = (f0 > config.voiced_threshold_hz).repeat_interleave(config.hop, 1)[..., None]
        amplitude = config.sine_amplitude
        waves = torch.where(
            voiced, amplitude * sines + config.noise_std * noise, amplitude / 3 * noise
        )
        return self.merge(waves.to(self.merge.weight.dtype)).tanh().transpose(1, 2)

    def forward(
        self, mel: Tensor, source: Tensor, start: Tensor | None = None, is_final: bool = True
    ) -> Tensor:
        """Filter the source into samples `[B, n]`, fp32; 0 before `start`.

        Args:
            mel: `[B, n_mels, F]`. Causal: unless `is_final`, the last `look_right` frames are
                only looked at, and n stands for F - look_right frames.
            source: `[B, 1, n]`, or more samples, of which a few are looked at.
            start: leading frames that do not belong to a row, int64 `[B]`; None = none.
        """
        config = self.config
        mel = blank(mel.to(self.conv_post.weight.dtype), before(start, 1, mel.shape[2]))
        if config.is_causal and is_final:
            mel = functional.pad(mel, (0, config.look_right))
        x = self.conv_pre(mel)
        n_frames = x.shape[2]
        spectrum = self._source_spectrum(source, n_frames, start)
        x = blank(x, before(start, 1, n_frames))
        per_frame = 1
        for stage, rate in enumerate(config.upsample_rates):
            per_frame *= rate
            n = n_frames * per_frame
            x = self.ups[stage](functional.leaky_relu(x, config.slope))
            x = blank(x, before(start, per_frame, n))
            if stage == len(config.upsample_rates) - 1:
                x, n = _mirrored_first(x, start, per_frame), n + 1
            x = self._stage(stage, x, spectrum, before(start, per_frame, n))
        dead = before(start, per_frame, x.shape[2])
        x = self.conv_post(functional.leaky_relu(x, SOURCE_SLOPE)).float()
        return self._samples(x, dead)

    def _stage(self, stage: int, x: Tensor, spectrum: Tensor, dead: Tensor | None) -> Tensor:
        calls = POINTWISE if dead is None else self.stream_calls
        source = blank(self.source_downs[stage](spectrum), dead)
        x = x + self.source_blocks[stage](source, dead, calls)
        n = len(self.config.block_kernels)
        blocks = list(self.blocks)[stage * n : (stage + 1) * n]
        mixed = blocks[0](x, dead, calls)
        for block in blocks[1:]:
            mixed = mixed + block(x, dead, calls)
        return mixed / n

    def _source_spectrum(self, source: Tensor, n_frames: int, start: Tensor | None) -> Tensor:
        """STFT of the source, real over imaginary parts: `[B, 2 bins, columns * F + 1]`."""
        half, hop = self.config.n_fft // 2, self.config.hop
        n = n_frames * hop
        last = min(source.shape[2], n + half) - 1
        index = torch.arange(-half, n + half, device=source.device)[None]
        begin = 0 if start is None else start[:, None] * hop
        index = torch.where(index < begin, 2 * begin - index, index)  # mirrored at both ends
        index = torch.where(index > last, 2 * last - index, index).clamp(0, last)
        signal = source[:, 0].gather(1, index.expand(source.shape[0], -1))[:, None]
        spectrum = functional.conv1d(
            signal, self.stft_basis.to(signal.dtype), stride=self.config.fft_hop
        )
        return blank(spectrum, before(start, self.config.columns, spectrum.shape[2]))

    def _samples(self, x: Tensor, dead: Tensor | None) -> Tensor:
        """Inverse STFT of what the last convolution gives, `[B, 2 bins, N]` fp32."""
        config = self.config
        log_magnitude, angle = x.split(config.n_bins, dim=1)
        magnitude = blank(log_magnitude.exp().clamp(max=MAX_MAGNITUDE), dead)
        angle = angle.sin()  # the net gives the sine of the phase
        parts = torch.cat((magnitude * angle.cos(), magnitude * angle.sin()), dim=1)
        ones = parts.new_ones(1, 1, x.shape[2]) if dead is None else (~dead).to(parts.dtype)
        stride, trim = config.fft_hop, config.n_fft // 2
        basis, window_power = self.istft_basis.float(), self.window_power.float()
        samples = functional.conv_transpose1d(parts, basis, stride=stride)
        power = functional.conv_transpose1d(ones, window_power, stride=stride)
        samples = (samples / power.clamp(min=1e-11))[:, 0, trim:-trim]
        samples = samples.clamp(-config.audio_limit, config.audio_limit)
        if dead is None:
            return samples
        return samples.masked_fill(dead[:, 0, :-1].repeat_interleave(config.fft_hop, dim=1), 0.0)


def _upsampler(config: HiftConfig, stage: int) -> nn.Module:
    n_in, n_out = config.channels(stage - 1), config.channels(stage)
    kernel, rate = config.upsample_kernels[stage], config.upsample_rates[stage]
    if config.is_causal:
        return Upsample(n_in, n_out, kernel, rate)
    return nn.ConvTranspose1d(n_in, n_out, kernel, rate, padding=(kernel - rate) // 2)


def _source_down(config: HiftConfig, stage: int) -> PaddedConv:
    n_in, n_out = 2 * config.n_bins, config.channels(stage)
    stride = config.source_stride(stage)
    if stride == 1:
        return PaddedConv(n_in, n_out, 1, (0, 0))
    padding = (stride - 1, 0) if config.is_causal else (stride // 2, stride // 2)
    return PaddedConv(n_in, n_out, 2 * stride, padding, stride)


def _mirrored_first(x: Tensor, start: Tensor | None, per_frame: int) -> Tensor:
    """Put one position in front of a row's first one: a copy of its second, `[B, C, N + 1]`."""
    shifted = functional.pad(x, (1, 0), mode="reflect")
    if start is None:
        return shifted
    index = torch.arange(shifted.shape[2], device=x.device)
    is_first = (index == start[:, None] * per_frame)[:, None]
    return torch.where(is_first, functional.pad(x[:, :, 1:], (0, 2)), shifted)


def transform_tables(config: HiftConfig) -> dict[str, Tensor]:
    """Return the bases of both transforms under the names of `Hift`'s buffers.

    A periodic Hann window; real over imaginary parts, as the net has them.
    """
    n, n_bins = config.n_fft, config.n_bins
    # On the CPU even while a module is built on the meta device, where this imports the compiler.
    fp64: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    time = torch.arange(n, **fp64)
    window = 0.5 - 0.5 * (2 * math.pi * time / n).cos()
    angle = 2 * math.pi / n * torch.arange(n_bins, **fp64)[:, None] * time
    forward = torch.cat((angle.cos(), -angle.sin())) * window  # [2 bins, n]
    # Bins between 0 and Nyquist stand for two of the full spectrum.
    weight = torch.full((n_bins, 1), 2.0 / n, **fp64)
    weight[0] = weight[-1] = 1.0 / n
    inverse = torch.cat((angle.cos() * weight, -angle.sin() * weight)) * window
    return {
        "stft_basis": forward[:, None].float(),
        "istft_basis": inverse[:, None].float(),
        "window_power": window.square()[None, None].float(),
    }


def hift_weights(source: Mapping[str, Tensor], config: HiftConfig) -> dict[str, Tensor]:
    """Rename the tensors of a `hift.pt` and fold their weight norm.

    Args:
        source: names of the published file, with or without the prefix "generator.".

    Raises:
        KeyError: a tensor is missing.
    """
    plain = _plain_names(source)
    n_stages = len(config.upsample_rates)
    weights = transform_tables(config)

    def conv(ours: str, theirs: str, dtype: torch.dtype = torch.float32) -> None:
        weights[f"{ours}.weight"] = _folded(plain, theirs, dtype)
        weights[f"{ours}.bias"] = plain[f"{theirs}.bias"].to(dtype)

    def block(ours: str, theirs: str, n: int) -> None:
        for i in range(n):
            for side in "12":
                conv(f"{ours}.convs{side}.{i}", f"{theirs}.convs{side}.{i}")
                alpha = plain[f"{theirs}.activations{side}.{i}.alpha"]
                weights[f"{ours}.snakes{side}.{i}.alpha"] = alpha

    conv("conv_pre", "conv_pre")
    conv("conv_post", "conv_post")
    for stage in range(n_stages):
        conv(f"ups.{stage}.conv" if config.is_causal else f"ups.{stage}", f"ups.{stage}")
        for part in ("weight", "bias"):
            weights[f"source_downs.{stage}.{part}"] = plain[f"source_downs.{stage}.{part}"]
        n_dilations = len(config.source_dilations[stage])
        block(f"source_blocks.{stage}", f"source_resblocks.{stage}", n_dilations)
        n = len(config.block_kernels)
        for i, dilations in enumerate(config.block_dilations):
            block(f"blocks.{stage * n + i}", f"resblocks.{stage * n + i}", len(dilations))
    # The phase is the integral of F0, so it is predicted in fp64: a GPU's convolutions of fp32 keep
    # ten bits (TF32), by which rows of a batch would sound other than alone.
    for i in range(F0Predictor.N_LAYERS):
        conv(f"f0.convs.{i}", f"f0_predictor.condnet.{2 * i}", torch.float64)
    for part in ("weight", "bias"):
        weights[f"f0.out.{part}"] = plain[f"f0_predictor.classifier.{part}"].double()
        weights[f"merge.{part}"] = plain[f"m_source.l_linear.{part}"]
    return weights


def _plain_names(source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("generator."): tensor for name, tensor in source.items()}


def _count(plain: Mapping[str, Tensor], prefix: str) -> int:
    """Return how many numbered parts there are under a prefix."""
    found = {
        name[len(prefix) + 1 :].split(".")[0] for name in plain if name.startswith(f"{prefix}.")
    }
    return len(found)


def _folded(plain: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    """Size times direction; the norm is over all but the first dimension."""
    size = plain[f"{name}.parametrizations.weight.original0"].to(dtype)
    direction = plain[f"{name}.parametrizations.weight.original1"].to(dtype)
    return direction * (size / direction.flatten(1).norm(dim=1)[:, None, None])
