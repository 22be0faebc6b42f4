"""DeepSpeed's linear function with biases that are added before rounding."""

from __future__ import annotations

import pytest
import torch

from ftcli.hardware.zero3_linear import linear, replace_linear
from ftcli.runtime.process_settings import restore_all


@pytest.mark.parametrize("shape", [(7, 16), (2, 7, 16), (2, 3, 7, 16)])
def test_linear_in_bf16_gives_the_bits_of_torch_in_both_passes(shape: tuple[int, ...]) -> None:
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    draw = torch.Generator().manual_seed(0)
    inputs, weight = (torch.randn(size, generator=draw) for size in (shape, (8, 16)))
    bias = torch.full((8,), 1e-2)  # half a unit in the last place of the products, or less

    def passes(function) -> list[torch.Tensor]:
        values = [one.clone().requires_grad_() for one in (inputs, weight, bias)]
        with torch.autocast("cpu", torch.bfloat16):
            output = function(*values)
        output.float().square().sum().backward()
        return [output.detach(), *(value.grad for value in values)]

    plain = passes(torch.nn.functional.linear)
    assert plain[0].dtype == torch.bfloat16
    assert [torch.equal(a, b) for a, b in zip(passes(linear), plain, strict=True)] == [True] * 4
    if len(shape) > 2:  # else the library has changed, and this module is not needed
        assert not torch.equal(passes(zero3_linear_wrap)[0], plain[0])


def test_replace_linear_lasts_until_the_run_ends() -> None:
    from deepspeed.runtime.zero import partition_parameters

    plain, wrapped = torch.nn.functional.linear, partition_parameters.zero3_linear_wrap
    replace_linear()
    assert partition_parameters.zero3_linear_wrap is linear
    torch.nn.functional.linear = linear  # as DeepSpeed does when it shards the first weight
    restore_all()
    assert (torch.nn.functional.linear, partition_parameters.zero3_linear_wrap) == (plain, wrapped)
