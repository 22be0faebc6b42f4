"""Passes replayed as CUDA graphs give the outputs, gradients and running statistics of passes without graphs."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn

from ftcli.config.graph_exclusions import COMPARED
from ftcli.models.kernels.captured_pass import CapturedPass
from ftcli.models.kernels.channels_last import use_channels_last
from ftcli.models.kernels.padding_masks import padding_of, replace_mask_functions, use_padding
from ftcli.runtime.errors import InputError
from ftcli.tiny_models import build_tiny
from ftcli.training.batches.row_wait import RowWait

from ..support.small_classifiers import reads_texts, small_classifier
from ..unit.models.kernels.test_cuda_graphs import bert, resnet, vit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(autouse=True)
def deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def in_both_ways(make: Any) -> tuple[nn.Module, nn.Module]:
    """Return a model without graphs, and the same with graphs."""
    plain = make().cuda()
    captured = copy.deepcopy(plain)
    for model in (plain, captured):
        replace_mask_functions(model)
        use_channels_last(model, "cuda")
    captured.forward = CapturedPass(captured)
    return plain, captured


def train(model: nn.Module, images: list[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Return the losses of micro-batches whose gradients add up."""
    losses = []
    for batch in images:
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            logits = model(pixel_values=batch).logits
        loss = nn.functional.cross_entropy(logits.float(), torch.arange(len(batch), device="cuda") % 3)
        loss.backward()
        losses.append(loss.detach().clone())
    return losses


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: weight.grad for name, weight in model.named_parameters()}
    return found | dict(model.named_buffers())


@pytest.mark.parametrize("make", [resnet, vit])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_replayed_passes_equal_passes_without_graphs(make: Any, dtype: torch.dtype | None) -> None:
    size = 32 if make is resnet else 16
    steps = [[torch.randn(rows, 3, size, size, device="cuda") for rows in (6, 6, 6, 4)] for _ in range(3)]
    plain, captured = in_both_ways(make)
    for images in steps:
        expected, actual = train(plain, images, dtype), train(captured, images, dtype)
        assert all(a.equal(b) for a, b in zip(actual, expected, strict=True))
        wanted = state(plain)
        assert len(wanted) > 5
        for name, value in state(captured).items():
            assert value.equal(wanted[name]), name
        for model in (plain, captured):
            with torch.no_grad():
                for weight in model.parameters():
                    weight -= 0.1 * weight.grad
                    weight.grad = None
    for model in (plain, captured):
        model.eval()
    assert captured(pixel_values=steps[0][0]).logits.equal(plain(pixel_values=steps[0][0]).logits)


def test_a_second_forward_pass_before_the_backward_pass_runs_without_graphs() -> None:
    images = [torch.randn(6, 3, 32, 32, device="cuda") for _ in range(2)]
    plain, captured = in_both_ways(resnet)
    for model in (plain, captured):
        train(model, images[:1] * 3)
    factors = torch.randn(6, 3, device="cuda")  # the gradients of logits then have memory of their own in both
    for model in (plain, captured):
        first, second = (model(pixel_values=one).logits * factors for one in images)
        (first.sum() * second.mean()).backward()
    wanted = state(plain)
    assert all(value.equal(wanted[name]) for name, value in state(captured).items())


def test_weights_whose_memory_was_replaced_are_used() -> None:
    images = [torch.randn(6, 3, 32, 32, device="cuda")] * 3
    plain, captured = in_both_ways(resnet)
    for model in (plain, captured):
        train(model, images)
        weight = next(model.parameters())
        weight.data = 2 * weight.data
    assert train(captured, images)[2].equal(train(plain, images)[2])


def test_two_backward_passes_of_a_window_do_not_share_memory_with_the_graph() -> None:
    images = torch.randn(6, 3, 32, 32, device="cuda")
    _, captured = in_both_ways(resnet)
    train(captured, [images] * 2)
    assert captured.forward.graphs == 1
    captured.zero_grad()
    train(captured, [images])
    first = {name: weight.grad.clone() for name, weight in captured.named_parameters()}
    train(captured, [images])
    for name, weight in captured.named_parameters():
        assert weight.grad.equal(2 * first[name]), name


@pytest.mark.parametrize("is_busy", [False, True])
def test_row_wait_counts_only_the_time_in_which_the_gpu_is_idle(is_busy: bool) -> None:
    torch.cuda.synchronize()
    if is_busy:
        torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    wait = RowWait(torch.device("cuda", torch.cuda.current_device()))
    time.sleep(0.2)
    wait.end()
    assert wait.seconds() < 0.01 if is_busy else 0.19 < wait.seconds() < 0.3


def test_hooks_of_weights_run_once_and_dropped_outputs_do_not_count() -> None:
    images = torch.randn(6, 3, 32, 32, device="cuda")
    plain, captured = in_both_ways(resnet)
    for model in (plain, captured):
        for weight in model.parameters():
            weight.register_hook(lambda gradient: 0.5 * gradient)
        train(model, [images] * 2)
        model(pixel_values=images)
        train(model, [images])
    assert captured.forward._can_replay({"pixel_values": images})
    wanted = state(plain)
    assert all(value.equal(wanted[name]) for name, value in state(captured).items())


def deep_resnet() -> nn.Module:
    model: nn.Module = build_tiny(
        "ResNetForImageClassification", embedding_size=8, hidden_sizes=[8] * 4, depths=[1] * 4, num_labels=3
    )
    return model.train()


@pytest.mark.parametrize(("make", "parts"), [(resnet, 1), (deep_resnet, 3)])
def test_captured_passes_under_ddp_sum_the_gradients_of_a_window_once(make: Any, parts: int) -> None:
    """One process is enough: DistributedDataParallel runs its hooks and moves gradients into its buckets."""
    images = [torch.randn(6, 3, 64, 64, device="cuda") for _ in range(4)]
    plain, captured = in_both_ways(make)
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for model in (plain, captured):
            wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
            for _ in range(3):
                model.zero_grad(set_to_none=True)
                with wrapped.no_sync():
                    train(wrapped, images[:3])
                train(wrapped, images[3:])
    finally:
        torch.distributed.destroy_process_group()
    (capture,) = captured.forward.captures.values()
    assert len(capture.backward) == parts
    wanted = state(plain)
    assert all(value.equal(wanted[name]) for name, value in state(captured).items())


def vit_with_dropout() -> nn.Module:
    return vit(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.1)


def test_dropout_draws_the_same_numbers_as_without_graphs() -> None:
    images = torch.randn(6, 3, 16, 16, device="cuda")
    plain, captured = in_both_ways(vit_with_dropout)
    for step in range(4):
        losses = []
        for model in (plain, captured):
            torch.manual_seed(step)
            losses += train(model, [images, images])
        assert losses[0].equal(losses[2]) and losses[1].equal(losses[3]) and not losses[0].equal(losses[1]), step
    wanted = state(plain)
    assert captured.forward.graphs == 1
    for name, value in state(captured).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", sorted(COMPARED))
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_replayed_passes_of_every_compared_architecture_give_the_losses_of_others(
    kind: str, dtype: torch.dtype | None
) -> None:
    plain, captured = in_both_ways(lambda: small_classifier(kind))
    plain.forward = CapturedPass(plain, first=1000)  # pads texts in the same way, so that dropout draws alike
    hosts: Any = [texts([13, 9, 7]) if reads_texts(kind) else torch.randn(3, 3, 32, 32, device="cuda")] * 4
    losses = []
    for model in (plain, captured):
        torch.manual_seed(0)
        losses.append(train_texts(model, hosts, dtype) if reads_texts(kind) else train(model, hosts, dtype))
    assert captured.forward.graphs == 1
    torch.testing.assert_close(losses[1], losses[0], rtol=0 if dtype is None else 1e-6, atol=0)
    wanted = state(plain)
    for name, value in state(captured).items():
        if wanted[name] is not None:
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6, msg=name)


def texts(lengths: list[int], *, segments: bool = False) -> dict[str, torch.Tensor]:
    """Return padded texts on the host, with or without types of tokens."""
    longest = max(lengths)
    mask = (torch.arange(longest)[None] < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(2, 32, (len(lengths), longest), generator=torch.Generator().manual_seed(sum(lengths)))
    batch = {"input_ids": ids * mask, "attention_mask": mask}
    return batch | ({"token_type_ids": ids % 2 * mask} if segments else {})


def train_texts(
    model: nn.Module, batches: list[dict[str, torch.Tensor]], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    losses = []
    for host in batches:
        batch = {name: value.cuda() for name, value in host.items()}
        with (
            use_padding(padding_of(host), batch["attention_mask"]),
            torch.autocast("cuda", dtype, enabled=dtype is not None),
        ):
            logits = model(**batch).logits
        loss = nn.functional.cross_entropy(logits.float(), torch.arange(len(logits), device="cuda") % 2)
        loss.backward()
        losses.append(loss.detach())
    return losses


def test_texts_of_several_lengths_give_the_losses_and_gradients_of_passes_without_graphs() -> None:
    def make() -> nn.Module:
        return bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0)

    lengths = [[5, 9, 3], [7, 2, 12], [20, 30, 4], [16, 16, 16], [31, 17, 2], [5, 9], [1, 1, 1], [32, 32, 32]]
    batches = [texts(one, segments=True) for one in lengths]
    plain, captured = in_both_ways(make)
    for step in range(3):
        expected, actual = train_texts(plain, batches), train_texts(captured, batches)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
        wanted = state(plain)
        for name, value in state(captured).items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-6, msg=f"{name} in step {step}")
        plain.zero_grad(), captured.zero_grad()
    assert captured.forward.graphs == 3  # three texts of 16 and 32 tokens, two of 16


def test_models_that_copy_from_the_host_in_their_forward_pass_are_refused_or_run_without_graphs() -> None:
    _, captured = in_both_ways(lambda: small_classifier("mpnet"))
    with pytest.raises(InputError, match="the forward pass of MPNetForSequenceClassification cannot be captured"):
        train_texts(captured, [texts([5, 9, 3])] * 2)
    plain, optional = (small_classifier("mpnet").cuda() for _ in range(2))
    for model in (plain, optional):
        replace_mask_functions(model)
    plain.forward, optional.forward = CapturedPass(plain, first=1000), CapturedPass(optional, is_optional=True)
    losses = []
    for model in (plain, optional):
        torch.manual_seed(0)
        losses.append(train_texts(model, [texts([5, 9, 3])] * 3))
    assert optional.forward.graphs == 0
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0)


def test_a_second_backward_pass_through_a_replay_is_an_error() -> None:
    images = torch.randn(6, 3, 32, 32, device="cuda")
    _, captured = in_both_ways(resnet)
    train(captured, [images] * 2)
    loss = captured(pixel_values=images).logits.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a replayed pass has one backward pass"):
        loss.backward()


def test_memory_is_asked_for_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: asked.append(0) or (0, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.memory_allocated)
    model = resnet().cuda()
    model.forward = CapturedPass(model, is_optional=True)
    train(model, [torch.randn(rows, 3, 32, 32, device="cuda") for rows in (6, 4, 6, 4, 6, 4, 6)])
    assert model.forward.graphs == 0 and len(asked) == 2


def test_nothing_is_captured_in_the_first_step() -> None:
    images = torch.randn(6, 3, 32, 32, device="cuda")
    model = resnet().cuda()
    model.forward = CapturedPass(model, first=3)
    train(model, [images] * 3)
    assert model.forward.graphs == 0
    train(model, [images])
    assert model.forward.graphs == 1


def test_texts_with_padding_at_the_start_run_without_graphs() -> None:
    batch = texts([5, 9, 3])
    batch = {name: value.flip(1) for name, value in batch.items()}
    _, captured = in_both_ways(bert)
    train_texts(captured, [batch] * 3)
    assert captured.forward.graphs == 0
