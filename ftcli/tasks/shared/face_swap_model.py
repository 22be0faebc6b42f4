"""A generator of fused faces with the frozen networks of its loss, and the terms of this loss for each row.

    identity        1 - cos of the recogniser's vectors of the fused face and of the source
    reconstruction  mean absolute difference of the fused face and the target
    perceptual      squared difference of features of a frozen network of both (Johnson et al. 2016, eq. 2), divided by
                    the mean square of the target's, so that it has the same scale for every network and layer
    attributes      half the squared difference of the generator's own features of both (Li et al. 2019, eq. 2)

Images are in the order (fused, source, target). This module imports torch, so tasks import it inside functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ftcli.tasks.shared.swap_generator import SwapGenerator

SMALLEST = 1e-30  # of a divisor


class FaceSwapModel(nn.Module):
    """The generator and its helper networks in one module, so that a profile places and shards all of them.

    Args:
        generator: The network that is trained.
        recogniser: Returns (vectors `[B, D]`, features) of images. Frozen.
        perceptual: The same, for features. It may be the recogniser.
    """

    def __init__(self, generator: SwapGenerator, recogniser: nn.Module, perceptual: nn.Module) -> None:
        super().__init__()
        self.generator, self.recogniser, self.perceptual = generator, recogniser, perceptual

    def forward(self, source: Tensor, target: Tensor, *, measures: bool = False) -> Any:
        """Fuse faces, and measure the result if asked.

        Args:
            source: Images `[B, 3, S, S]`, values 0 to 1.
            target: As `source`.
            measures: Whether to return the terms of the loss.

        Returns:
            The fused images `[B, 3, S, S]`. With `measures` {"image": these, and `[B]` float32: each term, and cosines
            of the recogniser's vectors: `likeness` of the fused face and the target, `between` source and target}.
        """
        if not measures:
            return self.generator(source, target)
        fused, attributes = self.generator(source, target, with_attributes=True)
        with torch.no_grad():
            wanted, before = self.recogniser(source)[0], self.recogniser(target)[0]
            expected = self.perceptual(target)[1]
        found = self.recogniser(fused)[0]
        kept = self.generator.encoder(fused.to(attributes[0].dtype))
        scales = [features.square().flatten(1).mean(dim=1).clamp(min=SMALLEST) for features in expected]
        features = self.perceptual(fused)[1]
        return {
            "image": fused,
            "identity": 1 - nn.functional.cosine_similarity(found, wanted, dim=1),
            "reconstruction": _mean_difference([fused], [target.float()]),
            "perceptual": _mean_difference(features, expected, 2, scales),
            "attributes": 0.5 * _mean_difference(kept, attributes, 2),
            "likeness": nn.functional.cosine_similarity(found.detach(), before, dim=1),
            "between": nn.functional.cosine_similarity(wanted, before, dim=1),
        }


def _mean_difference(
    found: Sequence[Tensor], expected: Sequence[Tensor], power: int = 1, scales: Sequence[Tensor] | None = None
) -> Tensor:
    """Return the mean absolute difference to a power for each row, `[B]` float32, averaged over a list of features.

    Args:
        found: Features `[B, ...]`.
        expected: As `found`.
        power: 1 or 2.
        scales: Divisors for each row, `[B]` for each entry of the lists.
    """
    pairs = zip(found, expected, strict=True)
    means = [(a.float() - b.float()).abs().pow(power).flatten(1).mean(dim=1) for a, b in pairs]
    if scales is not None:
        means = [mean / scale for mean, scale in zip(means, scales, strict=True)]
    return torch.stack(means).mean(dim=0)
